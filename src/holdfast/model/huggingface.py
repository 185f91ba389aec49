"""Folders of safetensors that `transformers` loads: read them, write them.

    config.json  generation_config.json           the shape, in their words
    model.safetensors                             or model-00001-of-000NN.safetensors with
    model.safetensors.index.json                  an index, above `SHARD_BYTES`
    tokenizer.json  tokenizer_config.json         so that AutoTokenizer finds it

Tensors keep their dtype and their bytes in both directions. Nothing is ever unpickled: a folder
that has only `pytorch_model.bin` is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from holdfast.config.huggingface.convert import to_their_config
from holdfast.config.huggingface.folder import (
    CHAT_TEMPLATE,
    FETCH_AGAIN,
    GENERATION,
    end_ids,
    eos_of,
    read_folder_model,
    read_json_object,
)
from holdfast.config.sections.model import ModelConfig
from holdfast.core.format.hf_names import NameMap, Piece, huggingface_map
from holdfast.core.format.stored_weights import check_weights
from holdfast.errors import ModelFolderError
from holdfast.model.huggingface_files import TensorReader, WholeTensors, write_files
from holdfast.model.huggingface_tokenizer import copy_tokenizer, give_back
from holdfast.model.new_folder import new_folder

SHARD_BYTES = 5_000_000_000
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""All are written, for without one an architecture has a number of its own in mind."""


def export_folder(
    folder: Path,
    model: ModelConfig,
    tensors: Mapping[str, Tensor] | TensorReader,
    tokenizer_path: Path | None,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    end_token: str | None = None,
    imported: Path | None = None,
    chat_template: Path | None = None,
    finish: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a folder for `AutoModelForCausalLM` and `AutoTokenizer`.

    `tensors` maps our parameter names to full tensors, of which one is held at a time. If it reads
    them in part, a few megabytes are held. `dtype` casts; by default each keeps its own.
    `end_token` ends a text; none: a known one. `imported` may hold settings of the folder that the
    run began with (`KEPT_FILES`): they are given back, with its token ids. `chat_template`: the
    one that the run was trained with. finish: adds files of the caller. The
    folder appears as `new_folder` says. Raises ModelFolderError if the folder is not empty or
    cannot be written, or if no architecture of Hugging Face has this shape. Raises OutOfSpaceError
    when the disk is full.
    """
    config = to_their_config(model)
    with new_folder(folder) as partial:
        parts = WholeTensors(tensors) if isinstance(tensors, Mapping) else tensors
        stored = write_files(partial, huggingface_map(model), parts, dtype, shard_bytes)
        special = copy_tokenizer(tokenizer_path, partial, model.max_position, end_token)
        kept = give_back(imported, partial, tokenizer_path is not None)
        if chat_template is not None:
            shutil.copyfile(chat_template, partial / CHAT_TEMPLATE)
        ids = {key: kept.get(key, special.get(key)) for key in TOKEN_IDS}
        ends = (end_ids(imported) if imported else set()) | eos_of(special)
        if len(ends) > 1:
            ids["eos_token_id"] = sorted(ends)
        config |= {**ids, "dtype": stored, "torch_dtype": stored}
        _write_json(partial / "config.json", config)
        if not (path := partial / GENERATION).exists():
            _write_json(path, to_their_generation_config(ids))
        elif ends - eos_of(given := read_json_object(path)):
            _write_json(path, given | {"eos_token_id": ids["eos_token_id"]})
        finish(partial)


def import_folder(folder: Path, vocab_multiple: int = 1) -> tuple[ModelConfig, FolderTensors]:
    """Open a folder written by `transformers` or by `export_folder`.

    vocab_multiple: our embedding and head get padding rows of zeros up to a multiple of it.
    Reads the config and the headers of the files, no weights. Raises ModelFolderError, one
    sentence, if something is missing, has another shape, or is an architecture that the decoder
    cannot compute exactly.
    """
    model = read_folder_model(folder)
    model = model.model_copy(update={"vocab_multiple": vocab_multiple})
    return model, FolderTensors(folder, huggingface_map(model))


class FolderTensors(Mapping[str, Tensor]):
    """Our parameter names to tensors read from a folder's files, each at the moment it is asked
    for; `box` reads a part. Files stay mapped for as long as this object lives."""

    def __init__(self, folder: Path, names: NameMap):
        self._folder = folder
        self._places = names.all_places()
        self._files: dict[Path, Any] = {}
        self._stored = check_weights(folder, names)
        for entry in names.entries:
            if entry.alias_of is not None and entry.theirs in self._stored:
                self._check_tied(entry.theirs, entry.alias_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, name: str) -> Tensor:
        """The complete tensor, in the dtype of the file."""
        (entry, piece), *more = self._places[name]
        if piece.picked is None:
            return extract_piece(self._slice(entry.theirs), piece)
        picks = [self._slice(one.theirs)[:] for one, _ in ((entry, piece), *more)]
        return torch.stack(picks)

    def dtype(self, name: str) -> torch.dtype:
        """Return that of the file."""
        found: Tensor = self._slice(self._places[name][0][0].theirs)[:1]
        return found.dtype

    def box(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """The part [offsets, offsets + lengths) of our tensor `name`, reading only its bytes."""
        entry, piece = self._places[name][0]
        if piece.picked is not None:
            cut = tuple(slice(o, o + n) for o, n in zip(offsets[1:], lengths[1:], strict=True))
            wanted = self._places[name][offsets[0] : offsets[0] + lengths[0]]
            parts = [self._slice(one.theirs)[cut] for one, _ in wanted]
            return torch.stack(parts) if parts else torch.empty(0, *lengths[1:])
        begin, extent = list(offsets), list(lengths)
        beyond = 0
        if piece.dropped_rows:  # rows of ours that have no place in theirs
            begin[0], end = (min(n, piece.lengths[0]) for n in (begin[0], begin[0] + extent[0]))
            beyond = extent[0] - (end - begin[0])
            extent[0] = end - begin[0]
        at = tuple(o + b for o, b in zip(piece.offsets, begin, strict=True))
        return extract_piece(self._slice(entry.theirs), Piece(name, at, tuple(extent), beyond))

    def _slice(self, theirs: str) -> Any:
        file = self._stored[theirs].file
        if file not in self._files:
            self._files[file] = _opened(file)
        return self._files[file].get_slice(theirs)

    def _check_tied(self, alias: str, original: str) -> None:
        shapes = [self._slice(name).get_shape() for name in (alias, original)]
        if shapes[0] != shapes[1] or not torch.equal(
            self._slice(alias)[:], self._slice(original)[:]
        ):
            raise ModelFolderError(
                f"config.json ties {alias} to {original}, but their numbers differ",
                where=str(self._folder),
                remedy='set "tie_word_embeddings": false',
            )


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(
            f"this is not a complete safetensors file ({error})",
            where=str(path),
            remedy=FETCH_AGAIN,
        ) from error


def extract_piece(theirs: Any, piece: Piece) -> Tensor:
    """One of our tensors out of one of theirs (a tensor, or a slice of a file yet to be read)."""
    cut = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True))
    value: Tensor = theirs[cut]
    if piece.dropped_rows:
        value = torch.cat((value, value.new_zeros(piece.dropped_rows, *value.shape[1:])))
    return value


def to_their_generation_config(ids: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json: token ids, and sampling as `generate.py` does it by default."""
    return {**{key: value for key, value in ids.items() if value is not None}, "do_sample": True}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
