"""Initial weights: a function of (seed, parameter name), and of nothing else.

Each parameter is drawn in full, on the CPU, in float32, from a generator of its own, and only
then cast, sliced or moved. So the values do not depend on the ranks, the shard they hold, the
device, or the order in which parameters are filled. A float64 run, used to check a float32
one, starts from the same numbers.

The draws are NumPy's, in float64 and rounded once: a processor's vector units do not enter.
(torch's own `normal_` gives other bits on processors with AVX2 than on those without, so that
replicas on unlike machines would have begun apart.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.random import SFC64, Generator  # with this module: a fork server's, not each worker's
from numpy.typing import NDArray
from torch import Tensor

from holdfast.core.seeds import key_seed
from holdfast.core.sharding.parameters import Normal, Ones, Parameter, Uniform, decoder_parameters
from holdfast.model.decoder import Decoder

_CHUNK = 2**20  # float64 draws held at a time


def initial_tensor(parameter: Parameter, seed: int) -> Tensor:
    """The full initial value: float32, on the CPU, of the parameter's global shape.

    Padding rows come last and are zero, so the other rows' numbers do not depend on them.
    """
    value = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
    rows = value[: value.shape[0] - parameter.padding]
    generator = Generator(SFC64(key_seed(seed, "init", parameter.name)))
    match parameter.init:
        case Normal(std=std):
            _fill(rows, lambda size: generator.standard_normal(size) * std)
        case Uniform(bound=bound):
            _fill(rows, lambda size: generator.uniform(-bound, bound, size))
        case Ones():
            rows.fill_(1.0)
    return value


def _fill(value: Tensor, draw: Callable[[int], NDArray[np.float64]]) -> None:
    flat = value.view(-1).numpy()
    for start in range(0, flat.size, _CHUNK):  # chunks continue one stream: their size is free
        part = flat[start : start + _CHUNK]
        part[:] = draw(part.size)


def initial_box(
    parameter: Parameter, seed: int, offsets: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """The part of `initial_tensor` in a box: [offsets[d], offsets[d] + lengths[d]) of each dim d.

    All of it is drawn and sliced, because element i of a stream needs those before it. That costs
    one parameter's memory for a moment. Raises ValueError outside the shape.
    """
    for offset, length, size in zip(offsets, lengths, parameter.shape, strict=True):
        if offset < 0 or length < 0 or offset + length > size:
            raise ValueError(
                f"box {tuple(offsets)}+{tuple(lengths)} is outside {parameter.name} "
                f"of shape {parameter.shape}"
            )
    value = initial_tensor(parameter, seed)
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        value = value.narrow(dim, offset, length)
    return value.contiguous()


@torch.no_grad()
def initialise(model: Decoder, seed: int) -> None:
    """Fill every parameter in place, in the dtype and on the device it has (not meta)."""
    parameters = dict(model.named_parameters())
    for row in decoder_parameters(model.config):  # of a stage: those that it holds
        if row.name in parameters:
            parameters[row.name].copy_(initial_tensor(row, seed))
