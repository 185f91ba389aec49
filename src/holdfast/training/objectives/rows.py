"""Rows of a microbatch: sums over the targets of each document, and values of rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED_TARGET = -100


@dataclass(frozen=True)
class Rows:
    """The documents of B samples as rows: [B, N], where N is even and is 2 or more."""

    documents: Tensor  # [B, S] int64
    targets: Tensor  # [B, S]
    counts: Tensor  # [B, N] float64: targets of each row; 0: no row

    @staticmethod
    def of(targets: Tensor, documents: Tensor) -> Rows:
        """targets, documents: [B, S]"""
        last = int(documents.max()) if documents.numel() else 0
        count = (last + 2) // 2 * 2
        index = documents.long()
        ones = (targets != IGNORED_TARGET).double()
        counts = ones.new_zeros(len(targets), count).scatter_add(1, index, ones)
        return Rows(index, targets, counts)

    @property
    def present(self) -> Tensor:
        """[B, N] bool: which rows there are."""
        return self.counts > 0

    @property
    def pairs(self) -> Tensor:
        """[B, N / 2] bool: which pairs there are."""
        return self.present[:, 0::2] & self.present[:, 1::2]

    def sum(self, values: Tensor) -> Tensor:
        """Add up over the targets of each row, in float64.  [B, S] -> [B, N]"""
        carried = values.double().masked_fill(self.targets == IGNORED_TARGET, 0.0)
        zeros = carried.new_zeros(self.counts.shape)
        return zeros.scatter_add(1, self.documents, carried)

    def value(self, values: Tensor) -> Tensor:
        """Take the value at the last target of each row, in float64; 0 if there is no row.
        [B, S] -> [B, N]"""
        return self._last(values, self.targets != IGNORED_TARGET)

    def end(self, values: Tensor) -> Tensor:
        """Take the value at the last token of each row, in float64; 0 if there is no row.
        [B, S] -> [B, N]"""
        return self._last(values, torch.ones_like(self.targets, dtype=torch.bool))

    def _last(self, values: Tensor, counted: Tensor) -> Tensor:
        """The value at each row's last position of those that are counted [B, S]."""
        at = torch.arange(self.targets.shape[1], device=values.device)
        at = torch.where(counted, at, -1)
        empty = at.new_full(self.counts.shape, -1)
        place = empty.scatter_reduce(1, self.documents, at, "amax")
        picked = values.double().gather(1, place.clamp_min(0))
        return picked.masked_fill(~self.present, 0.0)


def count_rows(targets: NDArray[np.int64], documents: NDArray[np.int32]) -> NDArray[np.int64]:
    """Count the targets of each row.  [B, S] -> [B, N], N as in `Rows`"""
    last = int(documents.max()) if documents.size else 0
    counts = np.zeros((len(targets), (last + 2) // 2 * 2), dtype=np.int64)
    sample, at = np.nonzero(targets != IGNORED_TARGET)
    np.add.at(counts, (sample, documents[sample, at]), 1)
    return counts


def count_pairs(targets: NDArray[np.int64], documents: NDArray[np.int32]) -> int:
    """Count the pairs of documents 2i and 2i + 1 that both have targets."""
    counts = count_rows(targets, documents) > 0
    return int((counts[:, 0::2] & counts[:, 1::2]).sum())
