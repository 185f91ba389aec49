"""Token shards of Megatron: pairs of files `.bin` and `.idx`, whose documents are kept.

    .idx   "MMIDIDX", two zero bytes, version 1, uint64; code of the type of tokens, uint8;
           numbers of sequences and of document ends, uint64; then per sequence its tokens, int32,
           and its place in the .bin in bytes, int64; then per document its first sequence, int64,
           and at the end the number of sequences
    .bin   the tokens of the sequences, one after the other

A document has one sequence or more. Its text is what the tokenizer makes of its tokens, so stages
and duplicates work as for any other source. If no stage changes the text, the dataset has the
tokens as they are. A part of a unit is a range of documents.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from holdfast.data.read.containers import empty_error
from holdfast.data.read.source_files import TOKEN_KIND
from holdfast.data.read.text_sources import too_long_error
from holdfast.data.read.vocabulary import (
    Vocabulary,
    describe_tokenizer,
    load_tokenizer,
    tokenizer_file,
)
from holdfast.errors import DataError

MAGIC = b"MMIDIDX\0\0"
HEAD = struct.Struct("<QBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
AGAIN = "write the pair again, or leave it out of the source"
OTHER = "name the tokenizer that made the tokens in data.tokenizer.path"


class TokenText(str):
    """Text of a document that has tokens. ids: without its begin token and end token."""

    ids: NDArray[np.int64]

    def __new__(cls, text: str, ids: NDArray[np.int64]) -> TokenText:
        made = super().__new__(cls, text)
        made.ids = ids
        return made


@dataclass(frozen=True)
class _Index:
    dtype: str
    ends: NDArray[np.int64]  # per document: its end in the .bin, in tokens; the first is 0


def token_ranges(
    files: Sequence[str], unit_bytes: int, refused: list[DataError]
) -> list[list[tuple[str, int, int]]]:
    """Cut pairs into ranges of documents. A pair that cannot be read goes into `refused`."""
    out = []
    for path in sorted({f"{path[:-4]}.idx" for path in files}):
        try:
            index = _read_index(path)
        except DataError as error:
            refused.append(error)
            continue
        size, stop, count = np.dtype(index.dtype).itemsize, 0, len(index.ends) - 1
        while stop < count:
            start, bound = stop, int(index.ends[stop]) + unit_bytes // size
            stop = max(start + 1, int(np.searchsorted(index.ends, bound, side="right")) - 1)
            out.append([(path, start, stop)])
    return out


def read_documents(
    path: str, start: int, stop: int, tokenizer_path: str, limit: int
) -> Iterator[tuple[bytes, TokenText | DataError]]:
    """Yield the bytes of each document in a range, and the document, or why it cannot be used.

    Args:
        path: of the .idx.
        start, stop: documents.
        tokenizer_path: of the tokenizer.json that the tokens are of, or of its folder.
        limit: most bytes of a text.
    """
    index, (tokenizer, known) = _read_index(path), _tokenizer(tokenizer_path)
    tokens = np.memmap(_bin(path), dtype=index.dtype, mode="r")
    for number in range(start, stop):
        raw = tokens[index.ends[number] : index.ends[number + 1]]
        where = f"{_bin(path)}, document {number}"
        # No token is longer than its text, but for the few that stand for themselves.
        if len(raw) > limit:
            yield b"", too_long_error(where, limit, "the document has more tokens than")
            continue
        ids = raw.astype(np.int64)
        wrong = ids[(ids < 0) | (ids >= known.size)]
        if len(wrong):
            what = f"token {wrong[0]} is not among the {known.size:,} of the tokenizer"
            yield raw.tobytes(), DataError(what, where=where, remedy=OTHER)
            continue
        if len(ids) and ids[0] == known.begin_id:
            ids = ids[1:]
        if len(ids) and ids[-1] == known.end_id:
            ids = ids[:-1]
        text = TokenText(tokenizer.decode(ids.tolist(), skip_special_tokens=False), ids)
        if len(text.encode()) > limit:
            yield raw.tobytes(), too_long_error(where, limit, "the text is longer than")
        else:
            yield raw.tobytes(), text


@lru_cache(maxsize=2)
def _tokenizer(path: str) -> tuple[Tokenizer, Vocabulary]:
    file = tokenizer_file(path)
    tokenizer = load_tokenizer(file)
    return tokenizer, describe_tokenizer(tokenizer, file)


def _bin(path: str) -> str:
    return path.removesuffix(".idx") + ".bin"


def _damaged(what: str, where: str) -> DataError:
    return DataError(f"the index is damaged ({what})", where=where, remedy=AGAIN)


@lru_cache(maxsize=2)
def _read_index(path: str) -> _Index:
    """Raises DataError for an index that does not fit itself or its .bin."""
    for each in (path, _bin(path)):
        if not os.path.isfile(each):
            what = f"a pair has a .bin and an .idx, and {os.path.basename(each)} is missing"
            raise DataError(what, where=path, remedy=AGAIN)
        if not os.path.getsize(each):
            raise empty_error(each, f"a file of {TOKEN_KIND}")
    with open(path, "rb") as file:
        head = file.read(len(MAGIC) + HEAD.size)
    if len(head) < len(MAGIC) + HEAD.size or not head.startswith(MAGIC):
        raise DataError("this is no index of Megatron", where=path, remedy=AGAIN)
    version, code, sequences, documents = HEAD.unpack(head[len(MAGIC) :])
    if version != 1 or code not in DTYPES:
        what = f"version {version}, type of tokens {code}"
        raise DataError(
            f"an index of this form is not read: {what}",
            where=path,
            remedy=f"use version 1, and a type of {', '.join(map(str, DTYPES))}",
        )
    at, size = len(head), os.path.getsize(path)
    needed = at + 12 * sequences + 8 * documents
    # Multimodal indices have a byte more for each sequence.
    if size not in (needed, needed + sequences):
        raise _damaged(f"it has {size:,} bytes instead of {needed:,}", path)
    lengths = _part(path, "<i4", at, sequences)
    places = _part(path, "<i8", at + 4 * sequences, sequences)
    firsts = _part(path, "<i8", at + 12 * sequences, documents)
    item = np.dtype(DTYPES[code]).itemsize
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if (wrong := np.flatnonzero((lengths < 0) | (places != ends[:-1] * item))).size:
        raise _damaged("the place of a sequence", f"{path}, sequence {wrong[0]}")
    is_sound = documents > 0 and firsts[0] == 0 and firsts[-1] == sequences
    if not is_sound or (wrong := np.flatnonzero(np.diff(firsts) < 0)).size:
        number = wrong[0] if is_sound else documents - 1
        raise _damaged("the first sequence of a document", f"{path}, document {number}")
    if (found := os.path.getsize(_bin(path))) != ends[-1] * item:
        what = f"the file has {found:,} bytes, and its index names {int(ends[-1]) * item:,}"
        raise DataError(what, where=_bin(path), remedy=AGAIN)
    return _Index(DTYPES[code], ends[firsts])


def _part(path: str, dtype: str, at: int, count: int) -> NDArray[np.int64]:
    return np.fromfile(path, dtype=dtype, count=count, offset=at).astype(np.int64)
