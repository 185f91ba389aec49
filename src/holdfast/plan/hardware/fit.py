"""Constants of a device and of a link from measured times, by least squares. Pure.

Every sum is over relative errors, so that a small operation counts as much as a large one:

    products    t = ramp + max(FLOPs / rate, bytes / bandwidth)      ramp and rate by precision
    kernels     t = call + bytes / bandwidth (of a cache, if the data is in one)
    messages    t = steps x (latency + ramp x root(latency x m / W) + m / W)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median
from typing import Any

import numpy as np

from holdfast.plan.hardware.calibration import Calibration
from holdfast.plan.hardware.devices import ASSUMED, CPU, DeviceType, Efficiency
from holdfast.plan.hardware.link import Link

MOST_RAMP = 2.0
"""Largest weight of a link's root term: one more buffer in its chain."""
LINK_KINDS = ("allreduce", "message", "host")
"""Of samples, as `Calibration` has their links: gloo's all-reduce costs more than its messages."""
CACHE_GAIN = 2.0
"""How much faster than the memory a kernel has to move bytes to count as one of a cache."""
BEYOND_CACHES = 2**20
"""Bytes of a kernel from which on the memory, not a cache, bounds it."""
HOST_BOUND = 2.0
"""Of an accelerator's operations in a queue, those up to so many times as long as the shortest one
wait for the host."""
_ROUNDS = 5  # rounds that decide which products the memory bounds


@dataclass(frozen=True)
class Sample:
    """One measured operation.

    kind: product, attention (fused, causal, forward and backward), kernel (element-wise), copy,
        message or allreduce. host: to or from the host's memory. call: a kernel of one element.
        launch: the same in a training step. step: of the engine.
    """

    kind: str
    seconds: float
    size: float = 0.0  # bytes that move, or the message's; 0: none
    flops: float = 0.0  # 0: none
    precision: str = ""  # "" if it has no part in it
    ranks: int = 1
    name: str = ""  # of the probe

    @property
    def steps(self) -> int:
        """Messages one after the other."""
        return 2 * (self.ranks - 1) if self.kind == "allreduce" else 1

    @property
    def message_size(self) -> float:
        return self.size / self.ranks if self.kind == "allreduce" else self.size


@dataclass(frozen=True)
class FittedSample:
    """A measured time and what the fitted constants say."""

    sample: Sample
    fitted_s: float

    @property
    def error(self) -> float:
        """Relative, signed: above 0 if the fit is too slow."""
        return self.fitted_s / self.sample.seconds - 1


def least_squares(
    rows: Sequence[Sequence[float]], right: Sequence[float] | None = None
) -> list[float]:
    """x >= 0 with the least sum of (row . x - right)^2. A column whose x would be negative is left
    out.

    Each row is one measurement's terms, divided by its time. right: what they add up to, likewise
    divided; None: the complete time, so 1.
    """
    matrix, wanted = np.array(rows), np.ones(len(rows)) if right is None else np.array(right)
    scale = np.linalg.norm(matrix, axis=0)  # columns differ by many powers
    matrix = matrix / np.where(scale == 0, 1.0, scale)
    kept = list(range(len(scale)))
    while True:
        found = np.linalg.lstsq(matrix[:, kept], wanted, rcond=1e-6)[0]
        worst = int(found.argmin())
        if found[worst] >= 0 or len(kept) == 1:
            break
        del kept[worst]
    values = dict(zip(kept, found, strict=True))
    return [max(0.0, float(values.get(i, 0.0) / (s or 1.0))) for i, s in enumerate(scale)]


def fit_link(samples: Sequence[Sample]) -> Link | None:
    """The link of these messages and all-reduces, None without any."""
    if not samples:
        return None
    shares = [(each.steps / each.seconds, each.message_size) for each in samples]
    rows = [[share, share * size, share * sqrt(size)] for share, size in shares]
    latency, per_byte, root = least_squares(rows)
    ramp = root / sqrt(latency * per_byte) if latency and per_byte else 0.0
    if not latency or not per_byte or ramp > MOST_RAMP:
        latency, per_byte = least_squares([row[:2] for row in rows])
        ramp = 0.0
    smallest = min(each.seconds / each.steps for each in samples)
    return Link(latency or smallest, 1 / per_byte if per_byte else 1e15, ramp)


def fit_calibration(
    samples: Sequence[Sample],
    known: DeviceType | None,
    date: str,
    node: str,
    device: str,
    torch: str,
) -> Calibration:
    """All constants. known: the table's device, None if it has none whose peaks hold here."""
    launch, call = (
        median([each.seconds for each in samples if each.kind == kind])
        for kind in ("launch", "call")
    )
    is_host = device == CPU
    if not is_host:  # the host's part is measured in steps (`StepCosts.kernel_s`)
        launch = ASSUMED.launch_s
    moved = [each for each in samples if each.kind == "kernel"]
    large = [each for each in moved if each.size >= BEYOND_CACHES] or moved
    per_byte = _slope(large, call) if is_host else _slope(_longer_than_host(large), 0.0)
    best = max(each.size / each.seconds for each in large)
    bandwidth = known.bandwidth if known else max(best, 1 / per_byte)
    memory = 1 / per_byte / bandwidth
    flops, efficiency = {}, {}
    for precision in dict.fromkeys(each.precision for each in samples if each.kind == "product"):
        products = [e for e in samples if e.kind == "product" and e.precision == precision]
        fitted = products if is_host else _longer_than_host(products)
        ramp, rate = _fit_products(fitted, per_byte)
        highest = max(rate, *(each.flops / each.seconds for each in products))
        peak = known.flops.get(precision, highest) if known else highest
        flops[precision] = peak
        attention = [e for e in samples if e.kind == "attention" and e.precision == precision]
        attended = median([e.flops / e.seconds for e in attention]) if attention else 0.0
        efficiency[precision] = Efficiency(rate / peak, memory, ramp, launch, attended / peak)
    inside, messages, host = (
        fit_link([each for each in samples if each.kind == kind]) for kind in LINK_KINDS
    )
    cache_bytes, cache_bandwidth = _fit_cache(moved, bandwidth, memory, call)
    return Calibration(
        date,
        node,
        device,
        torch,
        flops,
        bandwidth,
        efficiency,
        inside,
        messages,
        host,
        cache_bytes,
        cache_bandwidth,
        call,
        tuple(vars(each) for each in samples),
    )


def compare(samples: Sequence[Sample], fitted: Calibration) -> list[FittedSample]:
    """Each measured time next to what the constants say. Copies and launches are inputs."""
    pairs = [(each, _fitted_s(each, fitted)) for each in samples]
    return [FittedSample(each, seconds) for each, seconds in pairs if seconds is not None]


def _fitted_s(sample: Sample, fitted: Calibration) -> float | None:
    if sample.kind == "product":
        reached = fitted.efficiency[sample.precision]
        computing = sample.flops / (fitted.flops[sample.precision] * reached.compute)
        moving = sample.size / (fitted.bandwidth * reached.memory)
        return reached.ramp_s + max(computing, moving)
    if sample.kind == "attention":
        reached = fitted.efficiency[sample.precision]
        return sample.flops / (fitted.flops[sample.precision] * reached.attention)
    if sample.kind == "kernel":
        reached = next(iter(fitted.efficiency.values()))
        in_cache = sample.size <= fitted.cache_bytes
        bandwidth = fitted.cache_bandwidth if in_cache else fitted.bandwidth
        return fitted.call_s + sample.size / (bandwidth * reached.memory)
    links = dict(zip(LINK_KINDS, (fitted.inside, fitted.messages, fitted.host), strict=True))
    link = links.get(sample.kind)
    return sample.steps * link.message_s(sample.message_size) if link else None


def mean_error(found: Sequence[FittedSample]) -> float:
    """Mean of the absolute relative errors."""
    return sum(abs(each.error) for each in found) / len(found)


def _longer_than_host(samples: Sequence[Sample]) -> list[Sample]:
    """Those that an accelerator computes for longer than its host launches them."""
    least = min(each.seconds for each in samples)
    longer = [each for each in samples if each.seconds > HOST_BOUND * least]
    return longer or [max(samples, key=lambda each: each.seconds)]


def _fit_products(products: Sequence[Sample], per_byte: float) -> tuple[float, float]:
    """(ramp, FLOP/s). Which products the memory bounds follows from the last round's constants."""
    bound: set[int] = set()
    ramp, per_flop = 0.0, 0.0
    for _ in range(_ROUNDS):
        rows = [
            [1 / each.seconds, each.flops / each.seconds]
            for at, each in enumerate(products)
            if at not in bound
        ]
        ramp, per_flop = least_squares(rows)
        now = {
            at for at, each in enumerate(products) if each.size * per_byte > each.flops * per_flop
        }
        if now == bound or len(products) - len(now) < 3:
            break
        bound = now
    if not per_flop:  # all times alike: too small to see a rate
        per_flop = min(each.seconds / each.flops for each in products)
    return ramp, 1 / per_flop


def _fit_cache(
    kernels: Sequence[Sample], bandwidth: float, memory: float, call: float
) -> tuple[float, float]:
    """(cache_bytes, cache_bandwidth): up to the largest kernel that is much faster than memory."""
    fast = [e for e in kernels if e.size / e.seconds > CACHE_GAIN * bandwidth * memory]
    if not fast:
        return 0.0, 0.0
    most = max(each.size for each in fast)
    inside = [each for each in kernels if each.size <= most]
    return most, max(1 / _slope(inside, call), bandwidth * memory) / memory


def _slope(found: Sequence[Sample], fixed: float) -> float:
    """Seconds a byte of t = fixed + slope x size."""
    rows = [(each.size / each.seconds, 1 - fixed / each.seconds) for each in found]
    slope = sum(row * rest for row, rest in rows) / sum(row * row for row, _ in rows)
    return slope if slope > 0 else min(each.seconds / each.size for each in found)


def samples_from_json(found: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """Samples of a calibration's file."""
    return [Sample(**each) for each in found]
