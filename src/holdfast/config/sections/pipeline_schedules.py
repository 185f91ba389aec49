"""What each pipeline schedule asks of a run. `core/schedule/named.py` has their tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class ScheduleKind:
    """One named schedule.

    least_a_rank: microbatches of a replica, for each rank of its pipeline, that fill it; 0: one
        microbatch is enough.
    virtual: the stages that each rank has; 0: what is asked for. by_default: if nothing is.
    is_folded: its stages go down the ranks and up again (a V). Otherwise they go round the ranks.
    splits_backward: gradients of inputs and of weights are two actions.
    least: microbatches of a replica that it needs, whatever its pipeline.
    is_asynchronous: the pipeline is not emptied between steps, so that gradients are of older
        weights.
    """

    least_a_rank: int
    virtual: int
    is_folded: bool = False
    splits_backward: bool = False
    by_default: int = 1
    least: int = 1
    is_asynchronous: bool = False

    @property
    def usual_virtual(self) -> int:
        """The stages that each rank has if the run does not say."""
        return self.virtual or self.by_default

    def least_microbatches(self, ranks: int) -> int:
        """The microbatches of a replica that fill a pipeline of `ranks`."""
        return max(self.least, self.least_a_rank * ranks) if ranks > 1 else 1


SCHEDULE_KINDS: Mapping[str, ScheduleKind] = MappingProxyType(
    {
        "1f1b": ScheduleKind(1, 1),
        "gpipe": ScheduleKind(0, 0),
        "interleaved": ScheduleKind(1, 0, by_default=2),
        "zb-h1": ScheduleKind(1, 1, splits_backward=True),
        "zbv": ScheduleKind(1, 2, is_folded=True, splits_backward=True),
        "dualpipev": ScheduleKind(2, 2, is_folded=True, splits_backward=True),
        "pipedream": ScheduleKind(0, 1, least=2, is_asynchronous=True),
        "pipedream-2bw": ScheduleKind(2, 1, is_asynchronous=True),
        "pipemare": ScheduleKind(0, 1, is_asynchronous=True),
    }
)
"""By the name in the run file."""
