"""The tasks of one process on one unit: *scan* it, and later *tokenise* it.

Each result is one small file: a line of JSON, then bytes whose checksum that line holds. It is
written atomically, so an existing result is complete, and a killed preparation continues with the
units that have none.

    scan      per document: two halves of its xxh3-128 and its length, uint64 [documents, 3]; with
              stages, the same of the document that they leave, which of the header's reasons left
              it out (0: none), uint16 [documents], the number that it was judged by (or nan),
              float32 [documents], n-grams for `importance` (ends, int64 [documents], and buckets,
              uint16 [n-grams]), and signatures, uint16 [documents, HASHES]
    tokens    per split: lengths uint32 [documents], tokens uint16 or uint32 [tokens], and of chat
              data which tokens carry loss, uint8 [tokens]; of rated rows, and of pairs with
              margins, also values, float32 [documents]; of images and recordings, features, uint8
              [documents, bytes]

A scan row of length 0 is an empty document, or one that a stage leaves out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain as chain_pieces
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from holdfast.data.filters.chain import Chain, chain_of
from holdfast.data.filters.plain import hash_document
from holdfast.data.read.features import MediaText
from holdfast.data.read.files import READ_BYTES
from holdfast.data.read.sources import Unit, read_unit, unit_label
from holdfast.data.read.token_sources import TokenText
from holdfast.data.stages.chat_tokens import (
    BaselineRows,
    ChatCounts,
    Encoder,
    RowTokens,
    encode_rows,
)
from holdfast.data.stages.scan_tasks import read_staged, scan_unit
from holdfast.data.stages.text_pieces import PIECE_CHARACTERS, cut_text
from holdfast.data.stages.unit_files import SPOOL_BYTES, mapped, read_result, write_result
from holdfast.errors import DataError

BATCH_CHARACTERS = 1 << 17  # text handed to the tokenizer at a time
SPLITS = ("train", "validation")
DROP, TRAIN, VALIDATION = 0, 1, 2  # a document's lot, uint8

TokenArray = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class UnitTokens:
    """Tokens of one unit and split; every document ends with the end token, and begins with the
    begin token if the tokenizer has one. Of chat data a document is what the template makes of it,
    and `mask` says which tokens carry loss. values: of documents (`chat_tokens.RowTokens`).
    features: the bytes of each document's numbers (`read.features`)."""

    lengths: NDArray[np.uint32]
    tokens: TokenArray
    mask: NDArray[np.uint8] | None = None
    values: NDArray[np.float32] | None = None
    features: NDArray[np.uint8] | None = None

    def cut(self, documents: int) -> tuple[UnitTokens, UnitTokens]:
        """The first documents, and the rest."""
        at = int(self.lengths[:documents].sum(dtype=np.int64))
        mask, values, features = self.mask, self.values, self.features
        first, rest = (
            UnitTokens(
                self.lengths[by_document],
                self.tokens[by_token],
                None if mask is None else mask[by_token],
                None if values is None else values[by_document],
                None if features is None else features[by_document],
            )
            for by_document, by_token in (
                (slice(documents), slice(at)),
                (slice(documents, None), slice(at, None)),
            )
        )
        return first, rest


@dataclass(frozen=True)
class TokenizeSettings:
    """limit: most bytes of a document. end, begin: ids of the end token and of the begin token, if
    documents have one. raw: hash of the bytes that the scan has read. stop: ids that end a reply of
    chat data."""

    limit: int
    end: int
    dtype: str
    raw: str
    begin: int | None = None
    stop: tuple[int, ...] = ()

    def framed(self, pieces: Sequence[TokenArray]) -> list[TokenArray]:
        """The tokens of a document between its begin token and its end token."""
        first = [] if self.begin is None else [np.array([self.begin], dtype=self.dtype)]
        return [*first, *pieces, np.array([self.end], dtype=self.dtype)]


class _SplitTokens:
    """Tokens of one split, as they come; more than some megabytes of them lie on disk."""

    def __init__(self, folder: Path):
        self.lengths = array("I")
        self.values = array("f")
        self.tokens = 0
        self.chat = ChatCounts()
        self._file = SpooledTemporaryFile(SPOOL_BYTES, dir=str(folder))  # noqa: SIM115
        self._masks = SpooledTemporaryFile(SPOOL_BYTES, dir=str(folder))  # noqa: SIM115
        self._features = SpooledTemporaryFile(SPOOL_BYTES, dir=str(folder))  # noqa: SIM115

    def add_media(self, ids: list[NDArray[Any]], features: NDArray[Any]) -> None:
        self.add(ids)
        self._features.write(features.tobytes())

    def add_row(self, row: RowTokens, dtype: str) -> None:
        self.values.extend(row.values)
        for tokens in row.documents:
            self.add([tokens.ids.astype(dtype)])
            self._masks.write(tokens.mask.tobytes())

    def add(self, ids: list[NDArray[Any]]) -> None:
        count = sum(map(len, ids))
        self.lengths.append(count)
        self.tokens += count
        for piece in ids:
            self._file.write(piece.tobytes())

    def payload(self) -> Iterator[bytes]:
        yield np.frombuffer(self.lengths, dtype="<u4").tobytes() if self.lengths else b""
        yield from _pieces(self._file)
        yield from _pieces(self._masks)
        yield np.frombuffer(self.values, dtype="<f4").tobytes() if self.values else b""
        yield from _pieces(self._features)

    def close(self) -> None:
        self._file.close()
        self._masks.close()
        self._features.close()


def _pieces(file: Any) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(READ_BYTES):
        yield piece


def tokenise_unit(
    unit: Unit,
    settings: TokenizeSettings,
    lots: NDArray[np.uint8],
    tokenizer: Encoder,
    out: Path,
    chain: Chain | None = None,
    scanned: NDArray[np.uint64] | None = None,
    scores: NDArray[np.float32] | None = None,
) -> None:
    """Tokenise the documents of a unit that `lots` [documents] keeps, split by split, as the stages
    of `chain` leave them. scanned: the rows of the documents as the scan saw the stages leave them,
    [documents, 3], if a user's function is among them. scores: what a stage gives documents, if one
    does, [documents].

    Raises DataError when the bytes read are not those of the scan, or the texts not those rows.
    """
    seen = xxh3_128()
    splits = {lot: _SplitTokens(out.parent) for lot in (TRAIN, VALIDATION)}
    changed = DataError(
        "the source changed while it was being prepared",
        where=f"source {unit.name or unit.kind!r}: {unit_label(unit)}",
        remedy="run the same command again",
    )
    try:
        batches = _batches(read_unit(unit, settings.limit, seen), lots, changed, chain, scanned)
        if unit.is_chat:
            ends = _add_chat(batches, tokenizer, settings, splits)
        elif unit.features is not None:
            ends = _add_media(batches, tokenizer, settings, splits)
        else:
            kept = None if scores is None else scores[lots != DROP]
            ends = _add_texts(batches, tokenizer, settings, splits, kept)
        if seen.hexdigest() != settings.raw:
            raise changed
        header: dict[str, Any] = {"unit": unit.index, "dtype": settings.dtype, "ends": ends}
        for name, lot in zip(SPLITS, (TRAIN, VALIDATION), strict=True):
            split = splits[lot]
            header[name] = {"documents": len(split.lengths), "tokens": split.tokens}
            if unit.is_chat:
                header[name]["chat"] = asdict(split.chat)
            if split.values:
                header[name]["values"] = True
            if unit.features is not None:
                header[name]["features"] = unit.features.document_bytes
        write_result(
            out,
            header,
            lambda: chain_pieces(*(splits[lot].payload() for lot in (TRAIN, VALIDATION))),
        )
    finally:
        for split in splits.values():
            split.close()


def _add_texts(
    batches: Iterator[list[tuple[int, str]]],
    tokenizer: Encoder,
    settings: TokenizeSettings,
    splits: dict[int, _SplitTokens],
    scores: NDArray[np.float32] | None,
) -> int:
    """Returns how often the texts spell the end token, which is left out there: it would end its
    document too early. scores: of the documents that stay, if they have any."""
    ends = 0
    for number, (lot, pieces) in enumerate(encode_documents(batches, tokenizer)):
        ids = [np.array(piece, dtype=settings.dtype) for piece in pieces]
        kept = [piece[piece != settings.end] for piece in ids]
        ends += sum(map(len, ids)) - sum(map(len, kept))
        if any(map(len, kept)):
            splits[lot].add(settings.framed(kept))
            if scores is not None:
                splits[lot].values.append(float(scores[number]))
    return ends


def _add_media(
    batches: Iterator[list[tuple[int, str]]],
    tokenizer: Encoder,
    settings: TokenizeSettings,
    splits: dict[int, _SplitTokens],
) -> int:
    """As `_add_texts`, with the numbers of each document. Its text may be empty."""
    ends = 0
    for batch in batches:
        encoded = encode_documents(iter([batch]), tokenizer)
        for (lot, pieces), (_, text) in zip(encoded, batch, strict=True):
            assert isinstance(text, MediaText)
            ids = np.array([i for piece in pieces for i in piece], dtype=settings.dtype)
            kept = ids[ids != settings.end]
            ends += len(ids) - len(kept)
            splits[lot].add_media(settings.framed([kept]), text.features())
    return ends


def _add_chat(
    batches: Iterator[list[tuple[int, str]]],
    tokenizer: Encoder,
    settings: TokenizeSettings,
    splits: dict[int, _SplitTokens],
) -> int:
    """Returns 0: no message spells a special token."""
    baselines = {lot: BaselineRows() for lot in splits}
    for batch in batches:
        texts = [text for _, text in batch]
        encoded = encode_rows(texts, tokenizer, settings.begin, settings.end)
        for (lot, _), row in zip(batch, encoded, strict=True):
            split = splits[lot]
            if not all(tokens.targets for tokens in row.documents):
                split.chat.untrained += 1
                continue
            for tokens in row.documents:
                split.chat.add(tokens, settings.stop)
            is_rated = len(row.documents) == 1 and row.values
            for one in baselines[lot].add(row) if is_rated else [row]:
                split.add_row(one, settings.dtype)
    for lot, rest in baselines.items():
        for one in rest.end():
            splits[lot].add_row(one, settings.dtype)
    return 0


def read_tokens(path: Path, split: str) -> UnitTokens:
    header, at = read_result(path)
    dtype = np.dtype(header["dtype"])
    for name in SPLITS:
        documents, tokens = header[name]["documents"], header[name]["tokens"]
        is_chat, has_values = "chat" in header[name], "values" in header[name]
        size = header[name].get("features", 0)
        end = at + 4 * documents + dtype.itemsize * tokens
        last = end + (tokens if is_chat else 0)
        if name == split:
            lengths = mapped(path, "<u4", at, documents)
            ids = mapped(path, header["dtype"], at + 4 * documents, tokens)
            mask = mapped(path, "<u1", end, tokens) if is_chat else None
            values = mapped(path, "<f4", last, documents) if has_values else None
            features = (
                mapped(path, "<u1", last, documents * size).reshape(-1, size) if size else None
            )
            return UnitTokens(lengths, ids, mask, values, features)
        at = last + (4 * documents if has_values else 0) + documents * size
    raise KeyError(split)


def read_chat_counts(path: Path, split: str) -> ChatCounts:
    """Of a unit of chat data; zeros for any other."""
    header, _ = read_result(path)
    return ChatCounts(**header[split].get("chat", {}))


def read_ends(path: Path) -> int:
    """How often a unit's text spelt the end token."""
    header, _ = read_result(path)
    return int(header.get("ends", 0))


def _batches(
    texts: Iterator[str],
    lots: NDArray[np.uint8],
    changed: DataError,
    chain: Chain | None,
    scanned: NDArray[np.uint64] | None = None,
) -> Iterator[list[tuple[int, str]]]:
    """(lot, text) of the kept documents, about BATCH_CHARACTERS at a time."""
    batch: list[tuple[int, str]] = []
    held = 0
    for place, text in enumerate(texts):
        if place >= len(lots):
            raise changed
        lot = int(lots[place])
        if lot != DROP:
            after = text if chain is None else chain.edit(text)
            text = text if after == text else after  # of a token shard, it has its tokens
            if scanned is not None and hash_document(text) != tuple(scanned[place].tolist()):
                raise DataError(
                    "a function changed a document to another text the second time",
                    where="data.stages",
                    remedy="use no clock, no random numbers and no order of a set in it",
                )
            batch.append((lot, text))
            held += len(text) + (len(text.content) if isinstance(text, MediaText) else 0)
        if held >= BATCH_CHARACTERS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def encode_documents(
    batches: Iterator[list[tuple[int, str]]], tokenizer: Encoder
) -> Iterator[tuple[int, Iterator[list[int]]]]:
    """(lot, ids of each piece) of each document. A long document is encoded piece by piece."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    for batch in batches:
        texts = [text for _, text in batch if not isinstance(text, TokenText)]
        short = [text for text in texts if len(text) <= PIECE_CHARACTERS]
        found = iter(tokenizer.encode_batch_fast(short, add_special_tokens=False) if short else ())
        for lot, text in batch:
            if isinstance(text, TokenText):
                yield lot, iter([text.ids.tolist()])
            elif len(text) <= PIECE_CHARACTERS:
                yield lot, iter([next(found).ids])
            else:
                yield lot, (encode(piece) for piece in cut_text(text, encode))


def perform_task(task: dict[str, Any], tokenizer_of: Callable[[str], Encoder]) -> None:
    """Do one task as it came, JSON-safe, from the preparing process."""
    unit = Unit.from_json(task["unit"])
    chain = None if task["stages"] is None else chain_of(task["stages"])
    if task["do"] == "scan":
        scan_unit(unit, task["limit"], Path(task["out"]), chain)
        return
    lots = np.frombuffer(Path(task["lots"]).read_bytes(), dtype=np.uint8)
    settings = TokenizeSettings(
        task["limit"], task["end"], task["dtype"], task["raw"], task["begin"], tuple(task["stop"])
    )
    tokenizer = tokenizer_of(task["tokenizer"])
    scanned = scores = None
    if chain is not None and chain.has_function:
        scanned = read_staged(Path(task["scan"])).rows()
    if chain is not None and chain.has_scores:
        scores = read_staged(Path(task["scan"])).scores()
    tokenise_unit(unit, settings, lots, tokenizer, Path(task["out"]), chain, scanned, scores)
