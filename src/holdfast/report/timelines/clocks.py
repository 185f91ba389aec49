"""One clock for all nodes, from exchanges that end at the same moment on each of them.

Wall clocks of two nodes are never compared. In the vote of a step, every rank waits for every other
rank. So the vote ends everywhere at once, but for the way of the last message. What two nodes say
of these ends gives the offset between their clocks and the drift. Both are fitted by medians
(Theil 1950; Sen 1968), so up to a quarter of the exchanges may be late without an effect.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

MIN_EXCHANGES = 3  # that a node must share; one late message looks like an offset
TOLERANCE_S = 0.002  # of the standard error of an offset
MIN_DRIFT_SPAN_S = 10.0  # shorter spans show no drift: 100 ppm of them are 1 ms
MAX_DRIFT = 1e-3  # quartz clocks have at most a fifth of it
_MAX_FITTED = 200  # exchanges of a fit, evenly chosen: their pairs are what costs time

Ends = Mapping[Hashable, float]
"""Exchange -> when it ended, in seconds of a node's clock."""


@dataclass(frozen=True)
class ClockFit:
    """Turns seconds of a node's clock into those of the reference."""

    origin_s: float = 0.0  # of the node's clock
    offset_s: float = 0.0  # reference minus node, at the origin
    drift: float = 0.0  # seconds that the reference gains in a second of the node
    exchanges: int = 0  # that it was fitted to
    residual_s: float = 0.0  # median distance of the ends, after the fit

    @property
    def error_s(self) -> float:
        """The standard error of the offset: that of a median, of normally distributed ends."""
        return 1.2533 * 1.4826 * self.residual_s / math.sqrt(max(1, self.exchanges))

    def to_reference(self, seconds: float) -> float:
        return seconds + self.offset_s + self.drift * (seconds - self.origin_s)


@dataclass(frozen=True)
class Alignment:
    """The clocks of all nodes that could be aligned, and why the rest could not."""

    clocks: dict[str, ClockFit] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # node -> why


def align_clocks(ends: Mapping[str, Ends], reference: str) -> Alignment:
    """Fit the clock of each node to the one of `reference`.

    A node that never met the reference is fitted to nodes that were. ends: by node."""
    found = Alignment({reference: ClockFit()})
    waiting = {node: own for node, own in ends.items() if node != reference}
    while waiting:
        known = _known_ends(ends, found.clocks)
        shared = {
            node: sorted(own.keys() & known.keys(), key=own.__getitem__)
            for node, own in waiting.items()
        }
        node = max(shared, key=lambda each: len(shared[each]))
        if not shared[node]:
            break
        own = waiting.pop(node)
        fit, problem = fit_clock([(own[key], known[key]) for key in shared[node]])
        if problem:
            found.refused[node] = problem
        else:
            found.clocks[node] = fit
    for node in waiting:
        found.refused[node] = "it shares no exchange with a node that could be aligned"
    return found


def fit_clock(pairs: list[tuple[float, float]]) -> tuple[ClockFit, str]:
    """Fit a clock to (its seconds, seconds of the reference) of each exchange, in time order.

    Returns the fit, and why it is of no use; "" if it is."""
    if len(pairs) < MIN_EXCHANGES:
        return ClockFit(), (
            f"it shares {len(pairs)} of the {MIN_EXCHANGES} exchanges that an alignment needs"
        )
    stride = -(-len(pairs) // _MAX_FITTED)
    fitted, origin = pairs[::stride], pairs[0][0]
    drift = 0.0
    if pairs[-1][0] - origin >= MIN_DRIFT_SPAN_S:
        drift = median(
            (b_reference - a_reference) / (b - a) - 1
            for (a, a_reference), (b, b_reference) in combinations(fitted, 2)
            if b > a
        )
    offset = median(reference - own - drift * (own - origin) for own, reference in fitted)
    fit = ClockFit(origin, offset, drift, len(pairs))
    residual = median(abs(fit.to_reference(own) - reference) for own, reference in pairs)
    fit = ClockFit(origin, offset, drift, len(pairs), residual)
    if abs(drift) > MAX_DRIFT:
        return fit, f"its clock seems to run {drift:.1%} faster or slower than the reference"
    if fit.error_s > TOLERANCE_S:
        return fit, (
            f"ends of its {len(pairs)} exchanges still differ by {residual * 1e3:.1f} ms (median)"
        )
    return fit, ""


def _known_ends(ends: Mapping[str, Ends], clocks: Mapping[str, ClockFit]) -> dict[Hashable, float]:
    """Return when each exchange ended on the reference's clock, by the median of aligned nodes."""
    said: dict[Hashable, list[float]] = {}
    for node, fit in clocks.items():
        for key, end in ends.get(node, {}).items():
            said.setdefault(key, []).append(fit.to_reference(end))
    return {key: median(each) for key, each in said.items()}
