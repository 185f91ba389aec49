"""Our parameter names and Hugging Face's, as a table that reads both ways.

Each `Entry` describes one of their tensors as pieces of ours, laid at offsets in it. The
things that an architecture can need are five ways of writing such an entry:

    rename   one piece that fills the tensor
    split    our pieces side by side along a dim of theirs (a fused q, k, v), to be split again
    pick     one index of dim 0 of ours, which theirs lacks (one expert of all)
    cut      one piece, larger than theirs; its rows beyond theirs are zero
    tie      no bytes of its own: an alias of another of their tensors

Only shapes and names stand here; `model/huggingface.py` moves the numbers. Going to their side
and back is exact by construction. Each of our names occurs in exactly one stored entry, or each of
its indices does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.config.huggingface.architectures import ARCHITECTURES, OUTSIDE_NAMES, Architecture
from holdfast.config.huggingface.convert import find_architecture
from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.parameters import SCORE, decoder_parameters

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One of our tensors inside one of theirs.

    `offsets` and `lengths` are its place in their tensor's shape. `dropped_rows` rows of ours, the
    last of dim 0, are zero and have no place in theirs (cut). `picked`: the index of dim 0 of ours
    that theirs is (pick).
    """

    ours: str
    offsets: Shape
    lengths: Shape
    dropped_rows: int = 0
    picked: int | None = None


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """One of their tensors: its shape, and the pieces of ours that it holds (or its alias)."""

    theirs: str
    shape: Shape
    pieces: tuple[Piece, ...]
    alias_of: str | None = None


def rename(ours: str, theirs: str, shape: Shape) -> TensorMapping:
    """One of theirs is one of ours."""
    return TensorMapping(theirs, shape, (Piece(ours, (0,) * len(shape), shape),))


def split(parts: Sequence[tuple[str, Shape]], theirs: str, dim: int) -> TensorMapping:
    """One of theirs is several of ours, (name, shape) each, side by side along `dim`."""
    pieces, begin = [], 0
    for ours, shape in parts:
        offsets = tuple(begin if d == dim else 0 for d in range(len(shape)))
        pieces.append(Piece(ours, offsets, shape))
        begin += shape[dim]
    first = parts[0][1]
    return TensorMapping(theirs, (*first[:dim], begin, *first[dim + 1 :]), tuple(pieces))


def trim_rows(ours: str, theirs: str, shape: Shape, dropped_rows: int) -> TensorMapping:
    """One of theirs is one of ours, of `shape`, without its last `dropped_rows` rows of zeros."""
    lengths = (shape[0] - dropped_rows, *shape[1:])
    return TensorMapping(
        theirs, lengths, (Piece(ours, (0,) * len(shape), lengths, dropped_rows=dropped_rows),)
    )


def pick(ours: str, theirs: str, index: int, shape: Shape) -> TensorMapping:
    """One of theirs is an index of dim 0 of one of ours. shape: of ours."""
    rest = shape[1:]
    return TensorMapping(theirs, rest, (Piece(ours, (0,) * len(rest), rest, picked=index),))


def tie(theirs: str, alias_of: str, shape: Shape) -> TensorMapping:
    """One of theirs is another of theirs; files need not hold it."""
    return TensorMapping(theirs, shape, (), alias_of)


@dataclass(frozen=True, slots=True)
class NameMap:
    """The complete table of one architecture. Raises ValueError if it could not be inverted."""

    entries: tuple[TensorMapping, ...]

    def __post_init__(self) -> None:
        ours = [
            piece.ours if piece.picked is None else f"{piece.ours}[{piece.picked}]"
            for entry in self.entries
            for piece in entry.pieces
        ]
        theirs = [entry.theirs for entry in self.entries]
        for side, names in (("our", ours), ("their", theirs)):
            twice = (
                sorted({name for name in names if names.count(name) > 1})
                if (len(set(names)) < len(names))
                else []
            )
            if twice:
                raise ValueError(f"{side} names occur twice in the name map: {twice}")

    @property
    def stored_entries(self) -> tuple[TensorMapping, ...]:
        """Entries that have bytes of their own."""
        return tuple(entry for entry in self.entries if entry.alias_of is None)

    def to_theirs(self) -> dict[str, tuple[TensorMapping, Piece]]:
        """Our name -> where it lies in which of their tensors. If they lie in several: the last."""
        return {piece.ours: (entry, piece) for entry in self.entries for piece in entry.pieces}

    def all_places(self) -> dict[str, list[tuple[TensorMapping, Piece]]]:
        """The same, with all tensors. Those of a `pick` are in the order of their index."""
        found: dict[str, list[tuple[TensorMapping, Piece]]] = {}
        for entry in self.entries:
            for piece in entry.pieces:
                found.setdefault(piece.ours, []).append((entry, piece))
        return found

    def to_ours(self) -> dict[str, TensorMapping]:
        """Their name -> its entry, aliases included."""
        return {entry.theirs: entry for entry in self.entries}


def huggingface_map(model: ModelConfig) -> NameMap:
    """The map of the architecture that the model is imported from or exported as.

    Rows keep their order: rotary pairs are halves of a head on both sides.
    """
    architecture = find_architecture(model) or ARCHITECTURES[model.family]
    return NameMap(tuple(_decoder_entries(model, architecture)))


def _decoder_entries(model: ModelConfig, architecture: Architecture) -> Iterator[TensorMapping]:
    rows = {row.name: row for row in decoder_parameters(model)}
    fused = {part: (whole, parts) for whole, parts in architecture.fused.items() for part in parts}
    for name, row in rows.items():
        if name == SCORE and model.has_language_head:
            continue  # a value head is no part of an export
        if name in OUTSIDE_NAMES:
            theirs = OUTSIDE_NAMES[name]
            cut = trim_rows(name, theirs, row.shape, row.padding) if row.padding else None
            yield cut or rename(name, theirs, row.shape)
            continue
        _, layer, inside = name.split(".", 2)
        part, _, kind = inside.rpartition(".")
        if part in architecture.by_expert:
            for expert in range(row.shape[0]):
                inside = architecture.by_expert[part].format(expert)
                yield pick(name, f"model.layers.{layer}.{inside}.{kind}", expert, row.shape)
            continue
        if part not in fused:
            whole = architecture.names.get(inside) or f"{architecture.names[part]}.{kind}"
            theirs = f"model.layers.{layer}.{whole}"
            yield rename(name, theirs, row.shape)
            continue
        whole, parts = fused[part]
        if part == parts[0]:
            names = [f"layers.{layer}.{p}.{kind}" for p in parts]
            pieces = [(n, rows[n].shape) for n in names]
            yield split(pieces, f"model.layers.{layer}.{whole}.{kind}", 0)
    if model.has_tied_head:
        shape = (model.vocab_size, model.dim)
        yield tie(OUTSIDE_NAMES["head.weight"], OUTSIDE_NAMES["embed.weight"], shape)
