"""What `holdfast simulate` reads for a study: plans and traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.api.progress import LongWork
from holdfast.cli.plan_request import PlanRequest, read_plan_request
from holdfast_lab.commands.trace import read_each
from holdfast_lab.engine.asked_study import Asked
from holdfast_lab.traces.events import EventStream
from holdfast_lab.traces.node_changes import ReadOptions


@dataclass(frozen=True)
class StudyInputs:
    """The surroundings of a study on the command line."""

    asked: Asked

    def plan(self, overrides: Sequence[str]) -> PlanRequest:
        keys = [*self.asked.overrides, *overrides]
        return read_plan_request(self.asked.run_file, keys, self.asked.cluster)

    def read(self) -> Sequence[EventStream]:
        options = ReadOptions(gpu=self.asked.gpu)
        return read_each(list(self.asked.traces), options, list(self.asked.zones))

    def progress(self) -> LongWork:
        return LongWork("planning")
