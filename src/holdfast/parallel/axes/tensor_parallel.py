"""The `tp` axis: tensor parallelism, with sequence parallelism between its regions.

A rank computes some heads of each attention and some inner units of each feed-forward (Shoeybi et
al. 2019, section 3). The first matrices of both are cut by rows of the stored weight, the last ones
by columns. So one sum over ranks ends each. The modules see complete tokens and need no change:
smaller weights are fewer heads. With sequence parallelism (Korthikanti et al. 2022, section 4.2.2)
the residual stream between them is cut by tokens, and so are norms and additions. The sum becomes a
reduce-scatter, and an all-gather comes before the next region. Norms and additions act on single
tokens, so any cut of the tokens will do. Rank i has the i-th contiguous part of all B*S tokens of a
microbatch. If n does not divide them, the last parts end in rows of zeros that belong to no token.

What a rank sends for one microbatch of T = B*S tokens, in elements, forward and backward:

    (n - 1) / n * T * D * (8 * blocks + 2 with the embedding + 2 with the head)
    and 2 * (n - 1) * T for the loss, in at least float32

with and without sequence parallelism: an all-reduce is a reduce-scatter and an all-gather. A
block has two regions, each with a sum forward and a sum backward: "two all-reduces per direction".
A region of a lower degree (`PartRegion`) may send less.

Parameters are plain tensors of local shape (`localise`), nothing is a DTensor. Gradients of what
several ranks hold may be partial: `core/sharding/sharding_table.gradient_is_partial` says which,
and the reducer adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.state_table import NO_DEGREES
from holdfast.errors import LayoutError
from holdfast.layout import component_degree
from holdfast.model.decoder import Decoder
from holdfast.model.experts import RoutedFeedForward
from holdfast.parallel.axes.vocab_parallel import (
    VocabularyEmbedding,
    VocabularyPart,
    VocabularySoftmax,
)
from holdfast.parallel.comm.collectives import Collectives
from holdfast.parallel.comm.comm_stats import TrafficCounter


class Region(Protocol):
    """A way into and out of a module that is computed over ranks."""

    def enter_region(self, x: Tensor) -> Tensor: ...

    def leave_region(self, x: Tensor) -> Tensor: ...


class PartRegion(Region, Protocol):
    """That of a component which fewer ranks cut than tp has."""

    def share(self, count: int) -> slice:
        """This rank's of `count` samples or tokens."""
        ...

    def exclude_from_compilation(self) -> None: ...


MakeRegion = Callable[["TensorParallel", int, bool], PartRegion]
"""(the region of all ranks, the component's degree, whether it needs complete samples)."""


class TensorParallel:
    """The way into and out of the tensor parallel regions of one decoder.

    `begin_forward` says which microbatch's forward follows. A backward needs no such word, so
    several microbatches may be in flight.
    """

    def __init__(self, collectives: Collectives, sequence_parallel: bool, part: VocabularyPart):
        self.sequence_parallel = sequence_parallel
        self.softmax = VocabularySoftmax(part, collectives)
        self.collectives = collectives
        self.attention: PartRegion | None = None
        self._regions: list[PartRegion] = []
        self.shape = (0, 0)

    def begin_forward(self, batch: int, sequence: int) -> None:
        """A forward of [batch, sequence] tokens follows."""
        self.shape = (batch, sequence)

    def attention_samples(self, batch: int) -> slice:
        """Of a microbatch, the samples whose attention this rank computes."""
        return slice(0, batch) if self.attention is None else self.attention.share(batch)

    def region(self, degree: int, make: MakeRegion | None, *, by_sample: bool) -> Region:
        """The way into and out of a component with this degree. make: a lower one needs it.
        by_sample: the component needs complete samples."""
        if degree == self.collectives.size or make is None:
            return self
        region = make(self, degree, by_sample)
        if by_sample:
            self.attention = region
        self._regions.append(region)
        return region

    def exclude_from_compilation(self) -> None:
        """The blocks around are to be: sends and receives are not for the compiler, so a compiled
        block ends and begins here."""
        aside: Any = torch.compiler.disable
        self.enter_region, self.leave_region = aside(self.enter_region), aside(self.leave_region)  # type: ignore[method-assign]
        for region in self._regions:
            region.exclude_from_compilation()

    def enter_region(self, x: Tensor) -> Tensor:
        """The residual stream, [ceil(B*S / n), D] where tokens are cut -> [B, S, D]"""
        if not self.sequence_parallel:
            return self.collectives.copy(x)
        batch, sequence = self.shape
        tokens = self.collectives.gather(x)[: batch * sequence]
        return tokens.view(batch, sequence, -1)

    def leave_region(self, x: Tensor) -> Tensor:
        """Each rank's summand [B, S, D] -> the residual stream, cut where tokens are"""
        if not self.sequence_parallel:
            return self.collectives.reduce(x)
        tokens = x.flatten(0, 1)
        missing = -tokens.shape[0] % self.collectives.size
        if missing:
            tokens = F.pad(tokens, (0, 0, 0, missing))
        return self.collectives.scatter(tokens)


class DecoderObjective(Protocol):
    """A module that computes a loss with a decoder: it calls `begin` before each forward, and
    enters before the head (`train.objective.NextTokenObjective`)."""

    decoder: Decoder
    tensor: TensorParallel | None


def apply_tensor_parallel(
    objective: DecoderObjective,
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool = True,
    degrees: Mapping[str, int] = NO_DEGREES,
    make_region: MakeRegion | None = None,
    traffic: TrafficCounter | None = None,
) -> TensorParallel:
    """Compute the objective's decoder, or the stage of one, over the ranks of `group`.

    Its parameters must have this rank's shape: call `localise` before or after. Apply it before
    blocks are compiled or sharded further. degrees: lower ones of components, whose regions
    `make_region` makes. Raises LayoutError for what cannot be cut.
    """
    decoder = objective.decoder
    collectives = Collectives(group, traffic)
    attention, ffn = (
        component_degree(degrees.get(name, 0), collectives.size) for name in ("attention", "ffn")
    )
    _check_units(decoder.config, attention, ffn)
    part = VocabularyPart.of(decoder.config, collectives.size, collectives.rank)
    tensor = TensorParallel(collectives, sequence_parallel, part)
    around_attention = tensor.region(attention, make_region, by_sample=True)
    around_ffn = tensor.region(ffn, make_region, by_sample=False)
    for block in decoder.layers:
        block.attention.o.bias_share = 1.0 / attention  # the region's end adds them up
        _wrap_region(block.attention, around_attention)
        _wrap_region(block.ffn, around_ffn)
        if isinstance(block.ffn, RoutedFeedForward):
            block.ffn.answers_for_tokens = collectives.rank == 0  # all ranks have the same ones
    if decoder.embed is not None:
        decoder.embed = VocabularyEmbedding(decoder.embed, part)
        decoder.embed.register_forward_hook(lambda _, tokens, x: tensor.leave_region(x))
    objective.tensor = tensor
    return tensor


def _wrap_region(module: nn.Module, region: Region) -> None:
    """Enter before the module, with its first argument; leave after it."""

    def enter(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (region.enter_region(given[0]), *given[1:])

    def leave(_: nn.Module, given: tuple[Any, ...], output: Tensor) -> Any:
        return region.leave_region(output)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _check_units(model: ModelConfig, tp: int, ffn: int) -> None:
    """Raise if attention's degree `tp`, or that of the feed-forward, does not fit. Each rank must
    have the key/value heads of its query heads. No inner unit may be held twice: the sum over
    ranks would count it twice."""
    if model.heads % tp:
        good = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
        raise LayoutError(
            f"tp {tp} does not divide the {model.heads} query heads",
            where="layout.tp",
            remedy=f"use one of {good}",
        )
    if model.kv_heads % tp and tp % model.kv_heads:
        raise LayoutError(
            f"tp {tp} is neither a divisor nor a multiple of the {model.kv_heads} key/value heads",
            where="layout.tp",
            remedy=f"use tp {model.kv_heads}",
        )
    if tp > 1 and model.qk_norm_width == "all":
        raise LayoutError(
            "tp cannot cut a norm that spans all query heads (model.qk_norm_width all)",
            where="layout.tp",
            remedy="use tp 1",
        )
    if model.inner_dim < ffn:
        raise LayoutError(
            f"tp {ffn} is more than the {model.inner_dim} inner units of SwiGLU",
            where="layout.tp",
            remedy=f"use tp {model.inner_dim}",
        )


def localise_parameters(module: nn.Module, boxes: Mapping[str, Box]) -> None:
    """Give every parameter the shape of this rank's box of it, in place. On the meta device: no
    values are kept.

    boxes: by parameter name, without "model."; of the tp and pp axes, not of dp_shard, whose cut
        FSDP2 makes. Boxes of parameters that the module does not have are left aside.
    Raises KeyError for a parameter without a box.
    """
    for path, owner in list(module.named_modules()):
        for name, parameter in list(owner.named_parameters(recurse=False)):
            box = boxes[f"{path}.{name}".removeprefix("decoder.")]
            if box.lengths != tuple(parameter.shape):
                made = torch.empty(box.lengths, dtype=parameter.dtype, device="meta")
                setattr(owner, name, nn.Parameter(made))


def residual_shape(
    batch: int, sequence: int, dim: int, tp: int, sequence_parallel: bool
) -> tuple[int, ...]:
    """Return the shape that a tp rank sends from one pipeline stage to the next for [batch,
    sequence] tokens."""
    if tp == 1 or not sequence_parallel:
        return (batch, sequence, dim)
    return (-(-batch * sequence // tp), dim)
