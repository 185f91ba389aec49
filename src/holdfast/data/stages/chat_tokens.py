"""Tokens of a chat document, and which of them carry loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.data.read.chat_documents import ChatDocument, RowDocuments
from holdfast.data.read.chat_render import Span


class Encoder(Protocol):
    """The part of a tokenizers.Tokenizer that tokenising needs."""

    encode_special_tokens: bool

    def encode_batch_fast(self, batch: list[str], *, add_special_tokens: bool) -> list[Any]: ...
    def encode_batch(self, batch: list[str], *, add_special_tokens: bool) -> list[Any]: ...


@dataclass(frozen=True)
class ChatTokens:
    """ids: [tokens]. mask: uint8 [tokens], above 0 for each token that is a target with loss
    (`core.data.target_weights`)."""

    ids: NDArray[np.int64]
    mask: NDArray[np.uint8]
    text_bytes: int  # of the text that the targets stand for

    @property
    def targets(self) -> int:
        """A document's first token has nothing before it, so it is no target."""
        return int(np.count_nonzero(self.mask[1:]))

    def stops(self, stop: Sequence[int]) -> bool:
        """Return True if the last trained part has a token that ends a reply."""
        trained = np.flatnonzero(self.mask)
        gaps = np.flatnonzero(np.diff(trained) > 1)
        last = trained[gaps[-1] + 1 :] if len(gaps) else trained
        return bool(np.isin(self.ids[last], stop).any())


@dataclass
class ChatCounts:
    """Counts of the documents of one unit and split. stopped: those that end with a stop token.
    begun_twice: those that begin with two begin tokens."""

    documents: int = 0
    tokens: int = 0
    targets: int = 0
    target_bytes: int = 0
    stopped: int = 0
    begun_twice: int = 0
    untrained: int = 0

    def add(self, tokens: ChatTokens, stop: Sequence[int]) -> None:
        self.documents += 1
        self.tokens += len(tokens.ids)
        self.targets += tokens.targets
        self.target_bytes += tokens.text_bytes
        self.stopped += tokens.stops(stop)
        self.begun_twice += len(tokens.ids) > 1 and bool(tokens.ids[0] == tokens.ids[1])

    def merge(self, other: ChatCounts) -> None:
        for key, value in asdict(other).items():
            setattr(self, key, getattr(self, key) + value)


@dataclass(frozen=True)
class RowTokens:
    """The documents of one row. values: of each document, if there are any. It is the margin of a
    pair. Of a rated answer it is the label (1 or -1), and 0 of its row of the KL baseline."""

    documents: tuple[ChatTokens, ...]
    values: tuple[float, ...] = ()


def encode_rows(
    texts: Sequence[str], tokenizer: Encoder, begin: int | None, end: int
) -> Iterator[RowTokens]:
    """Tokenise rows as `RowDocuments.encode` spells them. Special tokens that a template writes
    become tokens; no message spells one."""
    rows = [RowDocuments.decode(text) for text in texts]
    with _special_tokens_parsed(tokenizer):
        found = tokenizer.encode_batch(
            [document.text for row in rows for document in row.documents], add_special_tokens=False
        )
    encodings = iter(found)
    for row in rows:
        documents = [_masked(one, next(encodings), begin, end) for one in row.documents]
        values = () if row.value is None else (row.value,) * len(documents)
        yield RowTokens(tuple(_begin_alike(documents)), values)


def _begin_alike(documents: Sequence[ChatTokens]) -> Sequence[ChatTokens]:
    """Let loss begin at the same token in each answer to one prompt. One answer may change how the
    end of the prompt is tokenised."""
    if len(documents) == 1 or not all(document.targets for document in documents):
        return documents
    firsts = [int(np.argmax(document.mask > 0)) for document in documents]
    for document, first in zip(documents, firsts, strict=True):
        document.mask[min(firsts) : first] = 1
    return documents


class BaselineRows:
    """Adds to each rated answer a row of the KL baseline: its prompt, and the completion of the
    next rated answer. The last takes that of the first. As TRL's, it comes from the same rows."""

    def __init__(self) -> None:
        self._first: ChatTokens | None = None
        self._last: RowTokens | None = None

    def add(self, row: RowTokens) -> Iterator[RowTokens]:
        """The row before it, with its second document."""
        (document,) = row.documents
        self._first = self._first or document
        yield from self._with_completion_of(document)
        self._last = row

    def end(self) -> Iterator[RowTokens]:
        """The last row."""
        if self._first is not None:
            yield from self._with_completion_of(self._first)

    def _with_completion_of(self, other: ChatTokens) -> Iterator[RowTokens]:
        if self._last is None:
            return
        (document,) = self._last.documents
        prompt, completion = (int(np.argmax(one.mask > 0)) for one in (document, other))
        ids = np.concatenate((document.ids[:prompt], other.ids[completion:]))
        mask = np.concatenate((document.mask[:prompt], other.mask[completion:]))
        baseline = ChatTokens(ids, mask, other.text_bytes)
        yield RowTokens((document, baseline), (*self._last.values, 0.0))


@contextmanager
def _special_tokens_parsed(tokenizer: Encoder) -> Iterator[None]:
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = False
    try:
        yield
    finally:
        tokenizer.encode_special_tokens = before


def _masked(document: ChatDocument, encoding: Any, begin: int | None, end: int) -> ChatTokens:
    ids = np.array(encoding.ids, dtype=np.int64)
    starts, stops = _extents(encoding.offsets)
    mask = np.zeros(len(ids), dtype=np.uint8)
    weights = document.weights or (1,) * len(document.trained)
    for span, weight in zip(document.trained, weights, strict=True):
        # The tokens that have a character of the span.
        mask[((starts < span[1]) & (stops > span[0]))] = weight
    size = _bytes(document.text, starts, stops, mask > 0)
    if document.is_framed:
        first = [] if begin is None else [begin]
        ids = np.concatenate((first, ids, [end])).astype(np.int64)
        mask = np.concatenate((np.zeros(len(first)), mask, [1])).astype(np.uint8)
    return ChatTokens(ids, mask, size)


def _extents(offsets: Sequence[Span]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Characters [start, stop) of each token. Offsets may leave white space out; it then belongs
    to the token after it, so that the extents have no gaps."""
    table = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    stops = np.maximum.accumulate(table[:, 1])
    before = np.concatenate(([0], stops[:-1]))
    starts = np.minimum(np.minimum(table[:, 0], before), np.maximum(stops - 1, 0))
    return starts, stops


def _bytes(
    text: str, starts: NDArray[np.int64], stops: NDArray[np.int64], mask: NDArray[np.bool_]
) -> int:
    """UTF-8 bytes of the text that the trained tokens stand for."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0]))))
    runs = edges.reshape(-1, 2).tolist()
    return sum(len(text[starts[a] : stops[b - 1]].encode()) for a, b in runs)
