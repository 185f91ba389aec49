"""What the training loop asks of the world: three protocols, and nothing else.

A local run, a test and a fleet of agents are different implementations of the same three. The
loop itself knows no process, no file and no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from holdfast.core.data.learner_fates import LearnerFate
from holdfast.data.stream.loader import StepBatch
from holdfast.events import Event
from holdfast.policy.saving.destinations import SaveDestinations
from holdfast.training.engine.state import LocalTensor
from holdfast.training.engine.step_status import PhaseTimer
from holdfast.training.engine.vote import Wishes

if TYPE_CHECKING:
    from holdfast.parallel.gradients.feeder import GradientFeeder
    from holdfast.training.optimizers.optimizer import Optimizer


class Membership(Protocol):
    """Source of a rank's wishes. Asked once per step, just before the vote."""

    def requests(self, step: int) -> Wishes:
        """What this rank would like to happen at the end of `step`. Must return at once."""
        ...


class EventReporter(Protocol):
    """Destination of events. Both calls return at once; events stay in order."""

    def emit(self, event: Event) -> None: ...

    def progress(self, step: int, phase: str) -> None:
        """This rank is alive, in `phase` of `step`."""
        ...


class Saver(Protocol):
    """How state becomes a snapshot, and a snapshot a checkpoint.

    capture(N) comes right after the update of step N. The copy is made while step N + 1 computes,
    and fence() comes before its vote ends it. So a rank that has voted holds the complete snapshot
    before. The loop reports what the step did before it announces the snapshot. So no state is
    known whose ledger is missing. Nothing here raises for a save that fails: training continues.
    """

    def has_free_slot(self) -> bool:
        """Whether a capture would find room now, and still will after this step's vote."""
        ...

    def capture(self, step: int, state: Sequence[LocalTensor], wait: float, durable: bool) -> bool:
        """Begin to copy the state after `step`, which must not change before `fence` returns.
        durable: it will be a checkpoint; otherwise it stays in memory. False when there was no
        room within `wait` seconds."""
        ...

    def fence(self) -> float:
        """Wait until no copy is under way; seconds that this took, 0 when there was none."""
        ...

    def announce(self, step: int, meta: Mapping[str, Any], into: SaveDestinations) -> None:
        """Let the captured state of `step` be saved, or known of, once its copy is complete and
        after all events emitted so far. Returns at once."""
        ...

    def wait_until_committed(self, step: int, seconds: float, durable: bool = True) -> str | None:
        """Wait until `step` is durable, or without `durable` handed over. Returns None when it
        is, otherwise the reason why it is not."""
        ...


class LearnerStates(Protocol):
    """What a rank keeps of the learners that it computes; see `training/engine/learners.py`. With
    `server`, of the servers' updates; see `server_steps.py`.

    on_progress: called after each inner step. times: seconds of the newest round by phase. fates:
    of the round that was computed last, by learner; empty if each learner does all of its round.
    applies_update: `commit` changes the weights and what the run's optimizer keeps, which every
    rank has.
    """

    applies_update: bool
    times: PhaseTimer
    on_progress: Callable[[], None]
    fates: Sequence[LearnerFate]

    def used_units(self, batches: Sequence[Any]) -> int:
        """What this rank brings into the update of the round, in units of weight. batches: of its
        learners."""
        ...

    def divisor(self, tokens: float) -> float:
        """What the sum over learners is divided by. tokens: that all of them bring into it."""
        ...

    def open(self, step: int, gradients: GradientFeeder, optimizer: Optimizer) -> None:
        """Choose what a round exchanges and updates. gradients: they begin next."""
        ...

    def rate(self, step: int) -> float:
        """The rate of the last inner step of a round."""
        ...

    def state(self) -> list[LocalTensor]:
        """What a checkpoint holds of them after the last `commit`; the same storage every time."""
        ...

    def reset(self) -> None:
        """Begin as before the first round."""
        ...

    def commit(self) -> None:
        """The round that was computed last is applied."""
        ...

    def events(self) -> list[Event]:
        """What this rank, or one of them with `server`, tells of the newest applied step."""
        ...


StepShare = StepBatch[Any]
"""One rank's share of one step."""

StepFeed = Iterator[StepShare]
"""Shares of consecutive steps; `data.loader.Loader` is one."""


class ShareLoader(Protocol):
    """A StepFeed that holds threads or files while it is entered."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...
    def __iter__(self) -> StepFeed: ...
    def __next__(self) -> StepShare: ...
