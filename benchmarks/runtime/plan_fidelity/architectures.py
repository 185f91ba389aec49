"""Shapes of published models by name, from their configuration files, or from a parameter count.

MPT: llm-foundry's scripts/train/yamls. The rest: config.json on Hugging Face, or the paper.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from benchmarks.runtime.plan_fidelity.mixers import LowRank, Scan, joined, with_biases
from holdfast.plan.cost.blocks import FeedForward, Heads, Mixer, block, embedding, head
from holdfast.plan.cost.workload import Layer


@dataclass(frozen=True)
class Architecture:
    """blocks: (number, mixer, feed-forward), in order. learns_positions: a table of a row for each
    position of the sequence. heads: of tokens that each position predicts; they share a table.
    note: said of a shape that was derived."""

    dim: int
    vocabulary: int
    blocks: tuple[tuple[int, Mixer | None, FeedForward | None], ...]
    is_tied: bool = False
    has_biases: bool = False
    learns_positions: bool = False
    heads: int = 1
    note: str = ""

    def with_fused_experts(self) -> Architecture:
        """The shape with activations inside the products of gated experts without biases."""
        if self.has_biases:
            return self
        blocks = tuple(
            (number, mixer, replace(feed, is_fused=True) if feed and feed.is_gated else feed)
            for number, mixer, feed in self.blocks
        )
        return replace(self, blocks=blocks)

    def layers(self, sequence: int) -> tuple[Layer, ...]:
        """The layers as the planner takes them."""
        return tuple(self._layers(sequence))

    def _layers(self, sequence: int) -> Iterator[Layer]:
        yield embedding(self.dim, self.vocabulary, sequence if self.learns_positions else 0)
        for number, mixer, feed in self.blocks:
            one = joined(block(self.dim, mixer, feed))
            yield from (with_biases(one) if self.has_biases else one,) * number
        yield head(self.dim, self.heads * self.vocabulary)

    def flops(self, sequence: int) -> float:
        """FLOPs of a token's forward pass, without the embedding, with the causal half alone."""
        return sum(map(partial(forward_flops, sequence=sequence), self.layers(sequence)))

    @property
    def depth(self) -> int:
        return sum(number for number, _, _ in self.blocks)


def forward_flops(layer: Layer, sequence: int) -> float:
    """FLOPs of a token's forward pass in one layer."""
    flops = 2.0 * sum(product.parameters for product in layer.products)
    if layer.experts:
        flops += 2 * layer.experts.parameters * layer.experts.top_k / layer.experts.count
    if layer.attention:
        kind = layer.attention
        flops += 4 * kind.heads * kind.head_dim * kind.keys(sequence)
    return flops


def _gpt(dim: int, depth: int, heads: int, vocabulary: int) -> Architecture:
    one = (depth, Heads(heads, heads, dim // heads), FeedForward(4 * dim, is_gated=False))
    return Architecture(dim, vocabulary, (one,), True, True, True)


def _dense(
    dim: int, depth: int, heads: int, kv: int, inner: int, vocabulary: int, size: int = 0
) -> Architecture:
    one = (depth, Heads(heads, kv, size or dim // heads), FeedForward(inner))
    return Architecture(dim, vocabulary, (one,))


def _experts(
    dim: int, depth: int, heads: tuple[int, int, int], feed: FeedForward, vocabulary: int
) -> Architecture:
    return Architecture(dim, vocabulary, ((depth, Heads(*heads), feed),))


def _deepseek(
    dense: int, depth: int, heads: int, experts: int, words: int, predicted: int
) -> Architecture:
    dim = 7168
    mixer = LowRank(heads, 128, query_rank=1536, kv_rank=512, turned=64)
    first = (dense, mixer, FeedForward(18432))
    rest = (depth - dense, mixer, FeedForward(2048, experts=experts, top_k=8, shared=2048))
    return Architecture(dim, words, (first, rest), heads=predicted)


def _hybrid(
    dim: int,
    numbers: tuple[int, int, int],
    scan: Scan,
    heads: Heads,
    feed: FeedForward,
    predicted: int = 1,
) -> Architecture:
    """predicted: tokens; each but the first has a block of attention and of experts of its own."""
    scans, attentions, feeds = numbers
    blocks = (
        (scans, scan, None),
        (attentions + predicted - 1, heads, None),
        (feeds + predicted - 1, None, feed),
    )
    return Architecture(dim, 131072, blocks, heads=predicted)


def _oss(depth: int, experts: int) -> Architecture:
    feed = FeedForward(2880, experts=experts, top_k=4)
    near, far = Heads(64, 8, 64, window=128), Heads(64, 8, 64)
    blocks = ((1, near, feed), (1, far, feed)) * (depth // 2)
    return Architecture(2880, 201088, blocks, has_biases=True)


_MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
MPT: Mapping[str, Architecture] = MappingProxyType(
    {name: _gpt(*shape, 50368) for name, shape in _MPT.items()}
)
"""Of the rows of llm-foundry, whose names are sizes alone."""

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "gpt322b": _gpt(6144, 48, 64, 51200),
        "gpt3175b": _gpt(12288, 96, 96, 51200),
        "gpt3530b": _gpt(20480, 105, 128, 51200),
        "gpt31t": _gpt(25600, 128, 160, 51200),
        "llama27b": _dense(4096, 32, 32, 32, 11008, 32000),
        "llama213b": _dense(5120, 40, 40, 40, 13824, 32000),
        "llama270b": _dense(8192, 80, 64, 8, 28672, 32000),
        "llama38b": _dense(4096, 32, 32, 8, 14336, 128256),
        "llama370b": _dense(8192, 80, 64, 8, 28672, 128256),
        "llama3405b": _dense(16384, 126, 128, 8, 53248, 128256),
        "qwen38b": _dense(4096, 36, 32, 8, 12288, 151936, 128),
        "qwen314b": _dense(5120, 40, 40, 8, 17408, 151936, 128),
        "qwen332b": _dense(5120, 64, 64, 8, 25600, 151936, 128),
        "mixtral8x7b": _experts(
            4096, 32, (32, 8, 128), FeedForward(14336, experts=8, top_k=2), 32000
        ),
        "mixtral8x22b": _experts(
            6144, 56, (48, 8, 128), FeedForward(16384, experts=8, top_k=2), 32768
        ),
        "qwen330b": _experts(
            2048, 48, (32, 4, 128), FeedForward(768, experts=128, top_k=8), 151936
        ),
        "qwen3235b": _experts(
            4096, 94, (64, 4, 128), FeedForward(1536, experts=128, top_k=8), 151936
        ),
        "gptoss20b": _oss(24, 32),
        "gptoss120b": _oss(36, 128),
        "deepseekv3": _deepseek(3, 62, 128, 256, 129280, 2),
        "kimik2": _deepseek(1, 61, 64, 384, 163840, 1),
        "nemotron3nano": _hybrid(
            2688,
            (23, 6, 23),
            Scan(64, 64, 8, 128),
            Heads(32, 2, 128),
            FeedForward(1856, False, 128, 6, 3712),
        ),
        "nemotron3super": _hybrid(
            4096,
            (40, 8, 40),
            Scan(128, 64, 8, 128),
            Heads(32, 2, 128),
            FeedForward(2688, False, 512, 22, 5376, 1024),
            3,
        ),
        "nemotron3ultra": _hybrid(
            8192,
            (48, 12, 48),
            Scan(256, 64, 8, 128),
            Heads(64, 2, 128),
            FeedForward(5120, False, 512, 22, 10240, 2048),
            3,
        ),
    }
)


def named(model: str) -> Architecture | None:
    """Return the shape of a model by its name, however a publisher writes it; None: not known."""
    words = re.sub(r"[^a-z0-9]", "", re.sub(r"3\.[0-9]", "3", model.lower()))
    tries = (words, re.sub(r"a[0-9]+b$", "", words))
    return next((ARCHITECTURES[each] for each in tries if each in ARCHITECTURES), None)


def of_parameters(number: float, vocabulary: int, positions: int) -> Architecture:
    """Return a GPT of so many parameters: depth as MPT's models of near sizes have it, and heads of
    128 elements."""
    known = [(_size(shape), shape[1]) for shape in _MPT.values()]
    depth = max(1, round(_between(known, number)))
    # number = 12 depth dim^2 + (vocabulary + positions) dim
    tables = vocabulary + positions
    dim = (math.sqrt(tables**2 + 48 * depth * number) - tables) / (24 * depth)
    heads = max(1, round(dim / 128))
    shape = _gpt(heads * 128, depth, heads, vocabulary)
    note = f"{number / 1e9:.3g} B parameters taken for {depth} blocks of width {heads * 128}"
    return replace(shape, learns_positions=positions > 0, note=note)


def with_experts(active: float, total: float) -> Architecture:
    """Return a model of which 8 experts of a block compute a token; total 0: 128 experts."""
    dense = of_parameters(active, 128256, 0)
    dim, depth = dense.dim, dense.depth
    attention = dim * (2 * dim + 2 * 8 * 128)
    inner = max(64, round((active - 128256 * dim) / depth - attention) // (3 * 8 * dim))
    size = 3 * dim * inner
    count = max(8, round(((total - 2 * 128256 * dim) / depth - attention) / size)) if total else 128
    feed = FeedForward(inner, experts=count, top_k=8)
    note = (
        f"{active / 1e9:.3g} B parameters that compute a token taken for {depth} blocks of width "
        f"{dim} with {count} experts of width {inner}"
    )
    return Architecture(dim, 128256, ((depth, Heads(dim // 128, 8, 128), feed),), note=note)


def _size(shape: tuple[int, int, int]) -> float:
    dim, depth, _ = shape
    return 12.0 * depth * dim**2 + 50368 * dim


def _between(known: list[tuple[float, int]], size: float) -> float:
    """Interpolate in the logarithm of the size; outside, as the nearest."""
    for (low, one), (high, other) in itertools.pairwise(known):
        if size <= high:
            share = max(0.0, math.log(size / low) / math.log(high / low))
            return one + share * (other - one)
    return known[-1][1]
