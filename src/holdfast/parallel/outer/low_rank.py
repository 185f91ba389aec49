"""PowerSGD as a codec of one learner's change: two thin factors for each matrix.

A matrix M [n, m] is sent as P [n, r] and Q = M^T P [m, r] (Vogels et al., 2019, algorithm 1). The
columns of P are orthonormal. The paper starts from the Q of the step before, and adds up P and Q of
all workers. Here a codec is a function of the change alone. So Q starts from fixed random numbers,
and `ITERATIONS` of the power method take the place of earlier steps. Factors travel in bf16. A
tensor that is no matrix, or is shorter than its factors, travels in bf16 as it is.

The product is added up rank by rank with one multiplication and one addition at a time. So it has
the same bits on every processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from holdfast.core.round_bytes import is_factored
from holdfast.core.seeds import key_seed

ITERATIONS = 2
Shape = Sequence[int]


def encode_factors(shapes: Sequence[Shape], rank: int, values: Tensor) -> Tensor:
    """values: [n] fp32, the tensors of these shapes in order -> [bytes] uint8"""
    parts: list[Tensor] = []
    flats = torch.split(values, [prod(shape) for shape in shapes])
    for shape, flat in zip(shapes, flats, strict=True):
        if not is_factored(shape, rank):
            parts.append(flat)
            continue
        matrix = flat.view(shape[0], -1)
        seed = key_seed(rank, "powersgd", *matrix.shape)
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(matrix.shape[1], rank, generator=generator).to(flat.device)
        for _ in range(ITERATIONS):
            p = _orthonormal(matrix @ q)
            q = matrix.T @ p
        parts += [p.reshape(-1), q.reshape(-1)]
    return torch.cat(parts).to(torch.bfloat16).view(torch.uint8)


def decode_factors(shapes: Sequence[Shape], rank: int, payload: Tensor, count: int) -> Tensor:
    """The inverse, up to what the factors leave out. count: values, of all shapes."""
    numbers = payload.clone().view(torch.bfloat16).to(torch.float32)
    parts: list[Tensor] = []
    start = 0
    for shape in shapes:
        if not is_factored(shape, rank):
            parts.append(numbers[start : start + prod(shape)])
            start += prod(shape)
            continue
        n, m = shape[0], prod(shape[1:])
        p = numbers[start : start + n * rank].view(n, rank)
        q = numbers[start + n * rank : start + (n + m) * rank].view(m, rank)
        start += (n + m) * rank
        matrix = numbers.new_zeros(n, m)
        for k in range(rank):
            matrix += p[:, k, None] * q[None, :, k]
        parts.append(matrix.view(-1))
    found = torch.cat(parts)
    assert found.numel() == count, "the shapes are those of the run"
    return found


def _orthonormal(columns: Tensor) -> Tensor:
    """Gram-Schmidt, column by column, each twice. columns: [n, r]; a column of zeros stays so."""
    done: list[Tensor] = []
    for column in columns.unbind(1):
        for before in done * 2:
            column = column - before * (before @ column)
        length = torch.linalg.vector_norm(column)
        done.append(column / length.clamp_min(1e-30))
    return torch.stack(done, 1)
