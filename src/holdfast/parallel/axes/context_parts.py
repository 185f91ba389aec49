"""Which tokens a rank along `cp` has, and which keys its queries see. No tensor travels here.

A sample of S tokens is cut into 2n chunks of equal size. Rank r has chunk r and chunk 2n - 1 - r,
one near the head and one near the tail. Causal attention gives a late query more work than an early
one. With these two chunks every rank has equal work (Llama 3, section 3.3.2).

Between a chunk of queries and a chunk of keys there are four cases. The queries see none of the
keys, all of them, those before them (both chunks are one), or what a mask says. The order of
tokens decides it, with documents and windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Sight = Literal["none", "all", "causal", "mask"]
"""What the queries of a chunk see of the keys of another."""


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Return the two chunks of a rank, in the order of their tokens."""
    return rank, 2 * ranks - 1 - rank


def all_chunks(ranks: int) -> list[int]:
    """Return the chunks of all ranks, one rank after another."""
    return [chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks)]


class Part(NamedTuple):
    """Some keys that one chunk of this rank's queries sees.

    query: 0 or 1, the rank's first or second chunk. first, last: chunks of the keys by their place
    among those that are here, the last included. sight: never none.
    """

    query: int
    first: int
    last: int
    sight: Sight


def find_parts(
    queries: Sequence[int], keys: Sequence[int], look: Callable[[int, int], Sight]
) -> Iterator[Part]:
    """Yield what each chunk of queries sees of the chunks of keys that are here, in their order.
    Neighbours that are seen completely become one part."""
    for query, chunk in enumerate(queries):
        begun: int | None = None
        for place, other in enumerate([*keys, None]):
            sight: Sight = "none" if other is None else look(chunk, other)
            if begun is not None and sight != "all":
                yield Part(query, begun, place - 1, "all")
                begun = None
            if sight == "all":
                begun = place if begun is None else begun
            elif sight != "none":
                yield Part(query, place, place, sight)


class TokenRelations:
    """Which tokens of a microbatch see which, by chunks.

    size: tokens of a chunk. window: how many tokens back a token sees, itself included; 0: all.
    documents: [B, S], the number of each token's document, which rises in its row; None: a row is
    one document.
    """

    def __init__(self, size: int, documents: Tensor | None, window: int = 0) -> None:
        self.size, self.documents, self.window = size, documents, window
        self._ends: list[tuple[list[int], list[int]]] = []
        if documents is not None:
            edges = torch.stack((documents[:, ::size], documents[:, size - 1 :: size]), 1)
            self._ends = [(first, last) for first, last in edges.tolist()]

    def within(self, window: int) -> TokenRelations:
        """Return the same tokens for blocks that attend within `window` tokens."""
        near = TokenRelations(self.size, None, window)
        near.documents, near._ends = self.documents, self._ends
        return near

    def look(self, query: int, key: int) -> Sight:
        """Return what the queries of a chunk see of the keys of a chunk."""
        if key > query or not self._shares_document(query, key) or self._is_far(query, key):
            return "none"
        if self._has_one_document(query, key) and self._is_near(query, key):
            return "causal" if key == query else "all"
        return "mask"

    def mask(self, query: int, key: int, device: torch.device) -> Tensor:
        """Return which keys of a chunk the queries of a chunk see.  [B | 1, 1, size, size]"""
        size, documents = self.size, self.documents
        index = torch.arange(size, device=device)
        distance = (query - key) * size + index[:, None] - index
        seen = distance >= 0
        if self.window:
            seen &= distance < self.window
        if documents is None:
            return seen[None, None]
        ours, theirs = (documents[:, c * size : (c + 1) * size] for c in (query, key))
        return (seen & (ours[:, :, None] == theirs[:, None]))[:, None]

    def _shares_document(self, query: int, key: int) -> bool:
        """Return True if, in some row, a document has tokens in both chunks."""
        return not self._ends or any(last[key] >= first[query] for first, last in self._ends)

    def _has_one_document(self, query: int, key: int) -> bool:
        """Return True if, in every row, both chunks are of one document."""
        return all(first[key] == last[query] for first, last in self._ends)

    def _is_far(self, query: int, key: int) -> bool:
        """Return True if the window hides every key."""
        return 0 < self.window <= (query - key - 1) * self.size + 1

    def _is_near(self, query: int, key: int) -> bool:
        """Return True if the window hides no key."""
        return not self.window or (query - key + 1) * self.size <= self.window
