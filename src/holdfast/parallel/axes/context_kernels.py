"""Attention of some queries to some of their keys, which can be put together with the rest.

A kernel returns the result for the keys that it is given. It also returns the logarithm of the sum
of the scores' exponentials. With these two, results of several sets of keys are merged, as in ring
attention. The backward of a set of keys needs the merged result and logarithm, and no other keys
(Dao et al. 2022, section 3.1).

    fused    torch's own kernel for a CPU, of every dtype; scores are never kept
    scores   products, for limits of scores and for devices: some queries at a time

Shapes: B batch, H query heads, K key/value heads, L queries, M keys, h head dim.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.core.devices import device_kind
from holdfast.model.decoder import soft_limit
from holdfast.parallel.torch_compat import cpu_attention, cpu_attention_backward

_SCORES_AT_A_TIME = 2**26


class Keys(NamedTuple):
    """The keys and values that some queries see. k, v: [B, K, M, h].

    mask: [B | 1, 1, L, M], true for a key that is seen; None: all are seen. is_causal: of L = M
    keys, those before a query are. scale: of the scores.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float

    def spread(self, heads: int) -> tuple[Tensor, Tensor]:
        """Return keys and values with a head for each query head.  [B, H, M, h]"""
        groups = heads // self.k.shape[1]
        if groups == 1:
            return self.k, self.v
        return self.k.repeat_interleave(groups, 1), self.v.repeat_interleave(groups, 1)

    def gathered(self, gradient: Tensor) -> Tensor:
        """The inverse of `spread`, for gradients.  [B, H, M, h] -> [B, K, M, h]"""
        batch, heads, *rest = gradient.shape
        groups = heads // self.k.shape[1]
        return gradient if groups == 1 else gradient.view(batch, -1, groups, *rest).sum(2)


class PartialAttention(Protocol):
    """One of the two kernels."""

    def forward(self, q: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """q: [B, H, L, h] -> the result [B, H, L, h], logarithms [B, H, L]

        The result has q's dtype. A logarithm is -inf for a query that sees no key."""
        ...

    def backward(
        self, g: Tensor, q: Tensor, keys: Keys, merged: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v by these keys. g: of the merged result. merged: it
        and its logarithms."""
        ...


def choose_kernel(device: torch.device, softcap: float) -> PartialAttention:
    """Return the kernel for a device. softcap: limit of scores; 0: there is none."""
    is_fused = device_kind(device.type).is_host and not softcap
    return FusedAttention() if is_fused else ScoresAttention(softcap)


class FusedAttention:
    """torch's kernel for a CPU."""

    def forward(self, q: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """See `PartialAttention.forward`."""
        bias, (k, v) = _bias(keys.mask, q.dtype), keys.spread(q.shape[1])
        out, logs = cpu_attention(q, k, v, bias, keys.is_causal, keys.scale)
        if keys.mask is not None:  # the kernel says 0 where a query sees nothing
            logs = logs.masked_fill(~keys.mask.any(-1), -torch.inf)
        return out, logs

    def backward(
        self, g: Tensor, q: Tensor, keys: Keys, merged: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `PartialAttention.backward`."""
        bias, (k, v) = _bias(keys.mask, q.dtype), keys.spread(q.shape[1])
        dq, dk, dv = cpu_attention_backward(g, q, k, v, merged, bias, keys.is_causal, keys.scale)
        return dq, keys.gathered(dk), keys.gathered(dv)


class ScoresAttention:
    """Products on any device. softcap: limit of scores; 0: there is none."""

    def __init__(self, softcap: float = 0.0) -> None:
        self._softcap = softcap

    def forward(self, q: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """See `PartialAttention.forward`."""
        k, v = keys.spread(q.shape[1])
        outs, logs = [], []
        for rows in self._tiles(q, k):
            scores, _ = self._scores(q[:, :, rows], k, keys, rows)
            log = scores.logsumexp(-1)  # [B, H, l]
            shares = (scores - log.masked_fill(log == -torch.inf, 0.0)[..., None]).exp_()
            outs.append(shares.to(v.dtype) @ v)
            logs.append(log)
        return torch.cat(outs, 2), torch.cat(logs, 2)

    def backward(
        self, g: Tensor, q: Tensor, keys: Keys, merged: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `PartialAttention.backward`."""
        (k, v), (out, logs) = keys.spread(q.shape[1]), merged
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k, dtype=logs.dtype), torch.zeros_like(v, dtype=logs.dtype)
        for rows in self._tiles(q, k):
            some, slope = q[:, :, rows], g[:, :, rows]
            scores, unlimited = self._scores(some, k, keys, rows)
            shares = (scores - logs[:, :, rows, None]).exp_()
            dv += shares.to(v.dtype).mT @ slope
            mean = (slope * out[:, :, rows]).sum(-1, keepdim=True, dtype=logs.dtype)
            d = shares * ((slope @ v.mT).to(logs.dtype) - mean)
            if self._softcap:
                d *= 1.0 - (soft_limit(unlimited, self._softcap) / self._softcap).square()
            d = (d * keys.scale).to(q.dtype)
            dq[:, :, rows] = d @ k
            dk += d.mT @ some
        return dq, keys.gathered(dk).to(q.dtype), keys.gathered(dv).to(q.dtype)

    def _tiles(self, q: Tensor, k: Tensor) -> list[slice]:
        """Return rows of queries that are computed at a time."""
        rows, one = q.shape[2], max(1, q.shape[0] * q.shape[1] * k.shape[2])
        size = max(1, _SCORES_AT_A_TIME // one)
        return [slice(start, min(rows, start + size)) for start in range(0, rows, size)]

    def _scores(self, q: Tensor, k: Tensor, keys: Keys, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the scores of the queries in `rows`, -inf where a key is not seen, and what they
        are before the limit.  [B, H, l, M]"""
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = unlimited = (q @ k.mT).to(wide) * keys.scale
        if self._softcap:
            scores = soft_limit(scores, self._softcap)
        if keys.is_causal:
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(~seen.tril(rows.start), -torch.inf)
        elif keys.mask is not None:
            scores = scores.masked_fill(~keys.mask[:, :, rows], -torch.inf)
        return scores, unlimited


class MergedAttention:
    """Results of several sets of keys, as they are put together.

    out: [B, H, T, h]; logs: [B, H, T], both in at least float32.
    """

    def __init__(self, q: Tensor) -> None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        batch, tokens, heads, size = q.shape
        self.out = q.new_zeros(batch, tokens, heads, size, dtype=wide).transpose(1, 2)
        self.logs = q.new_full((batch, heads, tokens), -torch.inf, dtype=wide)

    def add(self, rows: slice, out: Tensor, logs: Tensor) -> None:
        """Take the result of more keys for the queries in `rows`."""
        before = self.logs[:, :, rows]
        after = torch.logaddexp(before, logs)
        least = after.masked_fill(after == -torch.inf, 0.0)  # a query that has seen no key yet
        old, new = (before - least).exp(), (logs - least).exp()
        held = self.out[:, :, rows]
        held.mul_(old[..., None]).add_(out * new[..., None])
        before.copy_(after)


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to scores: 0, or -inf for a key that is not seen."""
    if mask is None:
        return None
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
