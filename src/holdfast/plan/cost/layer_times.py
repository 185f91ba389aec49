"""Seconds of one layer on one device, from shapes and a device's constants.

A product of f FLOPs and b bytes takes ramp + max(f / reached FLOP/s, b / reached bandwidth). That
is the roofline (Williams et al., 2009) with a constant for what small products lose. The gradients
of its input and of its weights cost as much each. Attention is a fused kernel with a rate of its
own. Its scores never leave the chip, and its backward computes 2.5 times as much (Dao, 2023). All
other kernels move bytes.

Products in fp8 and fp4 read smaller operands, which a kernel rounds before. Everything else stays
in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from holdfast.plan.cost.collectives import gather_s
from holdfast.plan.cost.group_links import GroupLinks
from holdfast.plan.cost.workload import Layer, PassTimes, Product, Workload
from holdfast.plan.hardware.devices import DeviceType

ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward, as a multiple of its forward's."""

ATTENTION_OF_COMPUTE = 0.45
"""Rate of attention as a share of that of products, for devices without a fit. Fits of A100 give
0.43 and 0.46. On H100 kernels that were written for A100 give 0.32."""

SCORE_MOVES = 6.5
"""Elements moved for each score where kernels are not fused. A product writes it. The softmax and
the dropout read and write it, with a mask of a byte. A product reads it."""

ROUNDED_MOVES = 2.0
"""Elements moved to round one of an operand: read in 16 bits, written twice, along each side."""

NARROW = {"fp8": 1.0, "fp4": 0.5}
"""Bytes of an operand of a product in precisions that nothing but products uses."""


@dataclass(frozen=True)
class Part:
    """What a rank has of a layer."""

    tokens: float  # of its microbatch, before tp cuts them
    sequence: int  # tokens of a sample that attention sees
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = True
    recompute: str = "none"  # a word of `train.recompute`


class LayerTimes(Protocol):
    """Seconds of a layer: from shapes (`ShapeTimes`), or from a measured profile."""

    def of(self, layer: Layer, part: Part, device: DeviceType, links: GroupLinks) -> PassTimes: ...


@dataclass(frozen=True)
class ShapeTimes:
    """From shapes; see `Workload`."""

    precision: str
    item: float  # bytes of an element between kernels
    repeats_all: bool = False
    is_compiled: bool = True
    trained: float = 1.0  # share of the parameters that have gradients

    @staticmethod
    def of_workload(workload: Workload) -> ShapeTimes:
        return ShapeTimes(
            workload.precision,
            workload.item,
            workload.repeats_all,
            workload.is_compiled,
            workload.trained,
        )

    def of(self, layer: Layer, part: Part, device: DeviceType, links: GroupLinks) -> PassTimes:
        one = _Device.of(device, self.precision, self.item)
        degrees = [layer.degree(layer.part(i), part.tp) for i in range(len(layer.products))]
        each = [  # each set of ranks computes its own tokens
            one.product_s(part.tokens * degree / part.tp, product, degree)
            for product, degree in zip(layer.products, degrees, strict=True)
        ]
        products = sum(each) + self._experts_s(one, layer, part)
        attention = self._attention_s(one, layer, part)
        cut = part.tp if part.sequence_parallel else 1
        moved = layer.whole_moved / cut + layer.cut_moved / part.tp
        moved *= 1.0 if self.is_compiled else device.steps.moves
        other = one.moved_s(part.tokens * moved, layer.kernels) + one.rounding_s(layer, part)
        size = part.tokens * layer.width * self.item
        sent = {}
        if part.tp > 1 and layer.reductions:
            # a sum is a reduce-scatter and a gather, with and without sequence parallelism
            regions = [(part.tp, links.tp)] * layer.reductions
            if layer.part_tp:
                regions = [(layer.degree(i, part.tp), links.parts[i][0]) for i in (0, 1)]
            sent["tp"] = sum(2 * gather_s(on, size * n / part.tp, n) for n, on in regions)
        if part.cp > 1 and layer.attention is not None:
            kind = layer.attention
            keys = 2 * kind.kv_heads * kind.head_dim / part.tp * self.item * part.tokens * part.cp
            sent["cp"] = gather_s(links.cp, keys, part.cp)
        if part.ep > 1 and layer.experts is not None:
            size = part.tokens * layer.experts.width * self.item
            sent["ep"] = 2 * links.experts.seconds(size, layer.experts.top_k)
        forward = products + attention + other + sum(sent.values())
        # the backward does not need the output of the last product, so torch does not repeat it
        left_out = each[-1] if each and not self.repeats_all else 0.0
        is_fused = layer.attention is None or layer.attention.is_fused
        dropped = attention + (other if is_fused else 0.0)
        again = {"none": 0.0, "selective": dropped, "full": forward - left_out}
        inputs = products + ATTENTION_BACKWARD * attention + 2 * other + sum(sent.values())
        times = 3 if part.recompute == "full" else 2
        communication = {axis: times * s for axis, s in sent.items()}
        found = PassTimes(
            forward, inputs, self.trained * products, again[part.recompute], communication
        )
        return _with_host(found, layer, part, device)

    def _attention_s(self, one: _Device, layer: Layer, part: Part) -> float:
        if layer.attention is None:
            return 0.0
        kind = layer.attention
        scores = kind.heads / part.tp * kind.keys(part.sequence) * part.tokens
        seconds = 4 * kind.head_dim * scores / one.attention
        return seconds if kind.is_fused else seconds + one.moved_s(SCORE_MOVES * scores, 5)

    def _experts_s(self, one: _Device, layer: Layer, part: Part) -> float:
        """The experts of a rank compute as many tokens as the rank has, times top_k: their load is
        taken for even."""
        if layer.experts is None:
            return 0.0
        own = layer.experts.count / part.ep
        tokens = part.tokens * layer.experts.top_k / own
        products = layer.experts.products
        seconds = own * sum(one.product_s(tokens, product, part.tp) for product in products)
        # one grouped kernel computes all experts of a rank
        once = (own - 1) * len(products) * one.ramp_s if layer.experts.is_fused else 0.0
        return seconds - max(0.0, once)


def _with_host(times: PassTimes, layer: Layer, part: Part, device: DeviceType) -> PassTimes:
    """With the host's part of each kernel. It passes while an accelerator computes what was
    launched before, so the slower of the two counts. A CPU does one after the other."""
    kernel_s = device.steps.kernel_s
    if not kernel_s:
        return times
    products = float(len(layer.products))
    if layer.experts is not None:
        own = 1.0 if layer.experts.is_fused else layer.experts.count / part.ep
        products += own * len(layer.experts.products)
    others = layer.kernels + 2 * layer.reductions + (layer.attention is not None)

    def slower(computing_s: float, kernels: float) -> float:
        host_s = kernel_s * kernels
        return max(computing_s, host_s) if device.hides else computing_s + host_s

    return replace(
        times,
        forward=slower(times.forward, others + products),
        inputs=slower(times.inputs, 2 * others + products),
        weights=slower(times.weights, products),
        again=slower(times.again, others + products) if times.again else 0.0,
    )


@dataclass(frozen=True)
class _Device:
    """A device's speed in one precision."""

    products: float  # FLOP/s
    attention: float  # FLOP/s
    bytes: float  # of memory a second
    ramp_s: float
    launch_s: float
    item: float  # bytes of an element
    operand: float  # bytes of an element that a product reads
    slower: float  # see `StepCosts.products`

    @staticmethod
    def of(device: DeviceType, precision: str, item: float) -> _Device:
        reached = device.reached(precision)
        wide = "bf16" if precision in NARROW and "bf16" in device.flops else precision
        return _Device(
            device.peak(precision) * reached.compute,
            device.peak(wide) * (reached.attention or ATTENTION_OF_COMPUTE * reached.compute),
            device.bandwidth * reached.memory,
            reached.ramp_s,
            reached.launch_s,
            item,
            NARROW.get(precision, item),
            device.steps.products,
        )

    def product_s(self, tokens: float, product: Product, tp: int) -> float:
        cut = tp if product.cut else 1
        inputs = product.inputs / (tp if product.cut == "rows" else 1)
        outputs = product.outputs / (tp if product.cut == "columns" else 1)
        flops = 2 * tokens * product.parameters / cut
        read = self.operand * (tokens * inputs + product.parameters / cut)
        size = read + self.item * tokens * outputs
        return self.slower * (self.ramp_s + max(flops / self.products, size / self.bytes))

    def rounding_s(self, layer: Layer, part: Part) -> float:
        """Seconds to round what products of narrow precisions read."""
        if self.operand == self.item:
            return 0.0
        inputs = float(sum(each.inputs for each in layer.products))
        if layer.experts and not layer.experts.is_fused:
            inputs += layer.experts.top_k * sum(each.inputs for each in layer.experts.products)
        return self.moved_s(ROUNDED_MOVES * inputs * part.tokens / part.tp, 0)

    def moved_s(self, elements: float, kernels: int) -> float:
        return kernels * self.launch_s + self.item * elements / self.bytes
