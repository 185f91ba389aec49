"""Seconds of one layer on one device, from shapes and a device's constants.

A product of f FLOPs and b bytes takes ramp + max(f / reached FLOP/s, b / reached bandwidth): the
roofline (Williams et al., 2009) with a constant for what small products lose. The gradients of its
input and of its weights cost as much each. Attention is a fused kernel: its scores never leave the
chip, and its backward computes 2.5 times as much (Dao, 2023). All other kernels move bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from holdfast.plan.cost.collectives import all_to_all_s, gather_s
from holdfast.plan.cost.group_links import GroupLinks
from holdfast.plan.cost.workload import Layer, PassTimes, Product
from holdfast.plan.hardware.devices import DeviceType, Efficiency

ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward, as a multiple of its forward's."""


@dataclass(frozen=True)
class Part:
    """What a rank has of a layer. tokens: of its microbatch, before tp cuts them. sequence: tokens
    of a sample that attention sees. recompute: a word of `train.recompute`."""

    tokens: float
    sequence: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = True
    recompute: str = "none"


class LayerTimes(Protocol):
    """Seconds of a layer: from shapes (`ShapeTimes`), or from a measured profile."""

    def of(self, layer: Layer, part: Part, device: DeviceType, links: GroupLinks) -> PassTimes: ...


@dataclass(frozen=True)
class ShapeTimes:
    """From shapes. item: bytes of an element that is computed with."""

    precision: str
    item: float

    def of(self, layer: Layer, part: Part, device: DeviceType, links: GroupLinks) -> PassTimes:
        peak, reached = device.peak(self.precision), device.reached(self.precision)
        one = _Device(peak, reached, device.bandwidth, self.item)
        products = sum(one.product_s(part.tokens, each, part.tp) for each in layer.products)
        products += self._experts_s(one, layer, part)
        attention = self._attention_s(one, layer, part)
        cut = part.tp if part.sequence_parallel else 1
        moved = layer.whole_moved / cut + layer.cut_moved / part.tp
        other = one.moved_s(part.tokens * moved, layer.kernels)
        sent = self._sent_s(layer, part, links)
        forward = products + attention + other + sum(sent.values())
        again = {"none": 0.0, "selective": attention + other, "full": forward}[part.recompute]
        inputs = products + ATTENTION_BACKWARD * attention + 2 * other + sum(sent.values())
        times = 3 if part.recompute == "full" else 2
        return PassTimes(
            forward, inputs, products, again, {axis: times * s for axis, s in sent.items()}
        )

    def _attention_s(self, one: _Device, layer: Layer, part: Part) -> float:
        if layer.attention is None:
            return 0.0
        kind = layer.attention
        flops = 4 * kind.heads / part.tp * kind.head_dim * kind.keys(part.sequence) * part.tokens
        return one.flops_s(flops)

    def _experts_s(self, one: _Device, layer: Layer, part: Part) -> float:
        """The experts of a rank compute as many tokens as the rank has, times top_k: their load is
        taken for even."""
        if layer.experts is None:
            return 0.0
        own = layer.experts.count / part.ep
        tokens = part.tokens * layer.experts.top_k / own
        return own * sum(one.product_s(tokens, p, part.tp) for p in layer.experts.products)

    def _sent_s(self, layer: Layer, part: Part, links: GroupLinks) -> dict[str, float]:
        size = part.tokens * layer.width * self.item
        sent = {}
        if part.tp > 1 and layer.reductions:
            # a sum is a reduce-scatter and a gather, with and without sequence parallelism
            sent["tp"] = 2 * layer.reductions * gather_s(links.tp, size, part.tp)
        if part.cp > 1 and layer.attention is not None:
            kind = layer.attention
            keys = 2 * kind.kv_heads * kind.head_dim / part.tp * self.item * part.tokens * part.cp
            sent["cp"] = gather_s(links.cp, keys, part.cp)
        if part.ep > 1 and layer.experts is not None:
            copies = size * layer.experts.top_k
            sent["ep"] = 2 * all_to_all_s(links.shards, copies, part.ep)
        return sent


@dataclass(frozen=True)
class _Device:
    peak: float
    reached: Efficiency
    bandwidth: float
    item: float

    def product_s(self, tokens: float, product: Product, tp: int) -> float:
        cut = tp if product.cut else 1
        flops = 2 * tokens * product.parameters / cut
        inputs = product.inputs / (tp if product.cut == "rows" else 1)
        outputs = product.outputs / (tp if product.cut == "columns" else 1)
        size = self.item * (tokens * (inputs + outputs) + product.parameters / cut)
        return self.reached.ramp_s + max(
            self.flops_s(flops), size / (self.bandwidth * self.reached.memory)
        )

    def flops_s(self, flops: float) -> float:
        return flops / (self.peak * self.reached.compute)

    def moved_s(self, elements: float, kernels: int) -> float:
        size = self.item * elements
        return kernels * self.reached.launch_s + size / (self.bandwidth * self.reached.memory)
