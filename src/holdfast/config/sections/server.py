"""The section `server`: updates by parameter servers, and what changes them during a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from holdfast.config.sections.base import Never, Section

ServerMode = Literal["none", "synchronous", "bounded_stale", "switching"]
RateScaling = Literal["linear", "sqrt", "none"]


class ParameterServerConfig(Section):
    """Parameter servers: each worker owns a part of the weights, and updates it with gradients that
    all workers push ([parameter-server.md](../guide/parameter-server.md)). A step has many updates.
    All but mode synchronous give up promise 1: the journal has the order of the updates."""

    mode: Never[ServerMode] = "none"
    """none: no servers, one update a step. synchronous: an update waits for all of its gradients.
    bounded_stale: each microbatch is an update, on weights that lack some of the newest ones.
    switching: one or the other, by the measured straggling"""
    update_microbatches: Never[int] = Field(1, ge=1, le=2**16)
    """microbatches of a synchronous update. The learning rate of train is that of their mean"""
    staleness: Never[int] = Field(2, ge=0, le=2**16)
    """bounded_stale: microbatches by which a worker may be ahead of the slowest (SSP, Ho et al.,
    2013)"""
    rate_scaling: Never[RateScaling] = "sqrt"
    """how the rate follows the microbatches of an update: by their quotient to
    update_microbatches, or its square root. A stale gradient counts as a part of one"""
    max_update_microbatches: Never[int] = Field(0, ge=0, le=2**16)
    """synchronous: most microbatches of an update, which doubles while the gradient noise scale is
    larger (McCandlish et al., 2018); 0: it never grows"""
    noise_decay: Never[float] = Field(0.9, ge=0, lt=1)
    """part of the old mean that the noise scale keeps in each step"""
    straggling: Never[float] = Field(0.3, gt=0)
    """switching: the part of its time that lockstep may lose to the slowest worker. Above it, a run
    becomes bounded_stale; below half of it, synchronous"""

    @property
    def is_on(self) -> bool:
        """Return True if servers update the weights."""
        return self.mode != "none"

    @property
    def may_be_stale(self) -> bool:
        """Return True if the curve depends on the time that workers take."""
        return self.mode in ("bounded_stale", "switching")

    @property
    def grows(self) -> bool:
        """Return True if the noise of gradients may make updates larger."""
        return self.mode == "synchronous" and self.max_update_microbatches > 0

    def broken_rules(self) -> Iterator[str]:
        largest, first = self.max_update_microbatches, self.update_microbatches
        if not self.grows:
            return
        if first < 2:
            yield (
                f"update_microbatches {first} gives no noise of gradients to measure, and "
                f"max_update_microbatches {largest} needs it: use update_microbatches 2"
            )
        factor = largest // first
        if factor < 1 or largest % first or factor & (factor - 1):
            best = first << max(1, factor.bit_length() - 1)
            yield (
                f"max_update_microbatches {largest} is not update_microbatches {first} times a "
                f"power of 2: use max_update_microbatches {best}"
            )

    def notices(self) -> Iterator[str]:
        """Yield the lines that a run prints when it starts."""
        if self.may_be_stale:
            yield (
                f"server.mode {self.mode}: the curve depends on which gradients came first; "
                "the journal has their order, and holdfast audit replay computes it again"
            )
        elif self.is_on:
            yield (
                f"server.mode {self.mode}: a step has several updates, so the curve is another one "
                "than without servers; it does not depend on the number of workers"
            )
