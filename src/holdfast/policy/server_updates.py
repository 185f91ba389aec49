"""When a parameter server applies a gradient, with which rate, and how a run adapts its updates.

    synchronous    an update is the mean of the microbatches that belong to it
    bounded stale  each microbatch is an update. A worker may be `staleness` microbatches ahead of
                   the slowest one (stale synchronous parallel, Ho et al., 2013)

A step has so many microbatches for all workers. All of its decisions are functions of what the
workers tell each other at its end, so all workers decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from holdfast.config.sections.server import ParameterServerConfig, RateScaling


@dataclass(frozen=True)
class UpdateRule:
    """How the microbatches of one step become updates."""

    microbatches: int  # of the step
    is_synchronous: bool
    width: int  # microbatches of a synchronous update
    staleness: int  # microbatches by which a worker may be ahead of the slowest

    @property
    def updates(self) -> int:
        """Updates of the step."""
        return self.microbatches // self.width if self.is_synchronous else self.microbatches

    def update_of(self, microbatch: int) -> int:
        """The synchronous update that a microbatch belongs to. Neighbours belong to unlike ones,
        because a worker computes neighbours."""
        return microbatch % self.updates

    def order(self, share: Iterable[int]) -> list[int]:
        """The order in which a worker computes its share."""
        if not self.is_synchronous:
            return sorted(share)
        return sorted(share, key=lambda microbatch: (self.update_of(microbatch), microbatch))

    def asks_for_weights(self, order: Sequence[int], done: int) -> bool:
        """Return True if a worker needs newer weights after its first `done` microbatches."""
        if not self.is_synchronous:
            return done > 0
        before = self.update_of(order[done - 1]) if done else 0
        return self.update_of(order[done]) != before

    def may_continue(
        self, order: Sequence[int], done: int, version: int, other_counts: Iterable[int]
    ) -> bool:
        """Return True if a worker may get weights for the microbatch after its first `done`.

        version: updates of the step so far. other_counts: microbatches that each other worker has
        done, of those that have not done all of theirs.
        """
        if self.is_synchronous:
            return version >= self.update_of(order[done])
        return done - min(other_counts, default=done) <= self.staleness

    def largest_staleness(self, workers: int) -> int:
        """The most updates that weights may lack when their gradient is applied. While a worker
        computes, another one goes from `staleness` behind to `staleness` and one ahead."""
        if self.is_synchronous:
            return 0
        return (workers - 1) * (2 * self.staleness + 1)


def rate_factor(scaling: RateScaling, microbatches: float, usual: int) -> float:
    """The factor of the learning rate of an update of so many microbatches. usual: those of an
    update with factor 1. linear: Goyal et al. (2017); sqrt: Malladi et al. (2022), for Adam."""
    quotient = microbatches / usual
    if scaling == "none":
        return 1.0
    return quotient if scaling == "linear" else quotient**0.5


def stale_part(scaling: RateScaling, staleness: int, usual: int) -> float:
    """The factor of a gradient whose weights lack `staleness` updates of one microbatch.

    Zhang et al. (2016) scale the rate by it. An optimizer with momentum would then take all of a
    stale gradient into its next updates, and less of what fresh ones have left there. sqrt is for
    optimizers that divide by the size of gradients, so only their ratios count. Otherwise a
    gradient counts as one of the `usual` microbatches, or of 1 + staleness if these are more."""
    return 1 / (1 + staleness) if scaling == "sqrt" else usual / max(usual, 1 + staleness)


@dataclass(frozen=True)
class Adaptation:
    """What the next step is computed with. It is part of the state of a run.

    updates: of the run so far. noise, signal: running means of the trace of the gradients'
    covariance, a sample, and of the squared norm of the mean gradient; 0: none yet.
    """

    updates: int = 0
    width: int = 1
    is_synchronous: bool = True
    noise: float = 0.0
    signal: float = 0.0

    @property
    def noise_scale(self) -> float:
        """B_simple of McCandlish et al. (2018, equation 2.9), in samples; 0: not known."""
        return self.noise / self.signal if self.noise > 0 and self.signal > 0 else 0.0

    def numbers(self) -> list[float]:
        """The fields, as a state tensor has them."""
        return [self.updates, self.width, self.is_synchronous, self.noise, self.signal]

    @staticmethod
    def of_numbers(numbers: Sequence[float]) -> Adaptation:
        """The inverse of `numbers`."""
        updates, width, is_synchronous, noise, signal = numbers
        return Adaptation(int(updates), int(width), bool(is_synchronous), noise, signal)

    @staticmethod
    def first(config: ParameterServerConfig) -> Adaptation:
        """That of the first step."""
        return Adaptation(
            width=config.update_microbatches, is_synchronous=config.mode != "bounded_stale"
        )


def straggling_of(seconds: Sequence[Sequence[float]]) -> float:
    """The time that workers in lockstep would wait for the slowest, as a part of the mean time of
    their computation. seconds: by worker, of each of its microbatches in their order."""
    rows = min(map(len, seconds), default=0)
    columns = [[own[row] for own in seconds] for row in range(rows)]
    usual = sum(sum(column) / len(column) for column in columns)
    return sum(map(max, columns)) / usual - 1.0 if usual > 0 else 0.0


@dataclass(frozen=True)
class StepMeasures:
    """What all workers know at the end of a step.

    small, large: mean squared norm of the gradients of microbatches, and of those of updates.
    """

    microbatch_size: int
    small: float
    large: float
    straggling: float  # see `straggling_of`


def adapt(
    config: ParameterServerConfig, before: Adaptation, rule: UpdateRule, measures: StepMeasures
) -> Adaptation:
    """What follows from a step for the next one."""
    after = replace(before, updates=before.updates + rule.updates)
    if config.grows and rule.width > 1:
        after = _grow(config, after, measures)
    if config.mode == "switching":
        limit = config.straggling if before.is_synchronous else config.straggling / 2
        after = replace(after, is_synchronous=measures.straggling <= limit)
    return after


def _grow(config: ParameterServerConfig, before: Adaptation, measures: StepMeasures) -> Adaptation:
    """Estimate the noise as McCandlish et al. (2018, appendix A.1) do, with the gradients of a
    microbatch and of an update. Double the update if the noise scale is at least twice as large."""
    small_size = measures.microbatch_size
    large_size = small_size * before.width
    signal = (large_size * measures.large - small_size * measures.small) / (large_size - small_size)
    noise = (measures.small - measures.large) / (1 / small_size - 1 / large_size)
    keep = config.noise_decay if before.noise or before.signal else 0.0
    after = replace(
        before,
        noise=keep * before.noise + (1 - keep) * noise,
        signal=keep * before.signal + (1 - keep) * signal,
    )
    wider = 2 * before.width
    if wider <= config.max_update_microbatches and after.noise_scale >= small_size * wider:
        return replace(after, width=wider)
    return after
