"""Passes of a layer whose parameters shards share: its collectives travel while it computes.

While a layer computes, the parameters of the next one are gathered, and gradients of the one before
are summed. What takes longer than the computing delays it. And the collectives' own kernels take
multiprocessors and memory bandwidth from the computing. Galvatron measured 1.126 times as long for
both.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.plan.cost.workload import PassTimes

SLOWED = 0.126
"""Share of a collective's time that it adds to simultaneous computing (Galvatron: 1.126)."""


def with_collectives(
    times: PassTimes, forward_s: float, backward_s: float, hides: float = 1.0
) -> PassTimes:
    """Return the passes, longer by what they do not hide of so many seconds of collectives. hides:
    see `DeviceType.hides`."""
    forward = _added(times.forward, forward_s, hides)
    backward = _added(times.backward, backward_s, hides)
    sent = {**(times.communication or {}), "shards": forward + backward}
    return replace(
        times,
        forward=times.forward + forward,
        inputs=times.inputs + backward,
        communication=sent,
    )


def _added(computing_s: float, sending_s: float, hides: float) -> float:
    hidden_s = min(sending_s * hides, computing_s)
    return sending_s - hidden_s + SLOWED * hidden_s
