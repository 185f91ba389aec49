"""One measured row as the product's planner sees it, and what the planner predicts for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from holdfast.errors import DataError, UserError
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Evaluator, Problem, StepCost
from holdfast.plan.cost.workload import Workload
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.hardware.devices import DeviceType, Efficiency


@dataclass(frozen=True)
class Case:
    """A row. measured: tokens/s of one device. place: file and line. guesses: what the row does
    not state and was assumed for it alone. flops: of a token as its publisher counts them."""

    place: str
    label: str
    model: str
    device: str
    workload: Workload
    cluster: Cluster
    choice: Choice
    measured: float
    flops: float
    guesses: tuple[str, ...] = ()

    @property
    def precision(self) -> str:
        return self.workload.precision

    @property
    def group(self) -> tuple[str, str]:
        """Rows of a group share constants."""
        return self.device, self.precision

    @cached_property
    def configuration(self) -> tuple[object, ...]:
        """Equal for rows that the planner cannot tell apart, like those of several releases."""
        work = self.workload
        size = (work.name, work.sequence, work.batch, work.precision)
        return self.device, *size, self.choice, work.state, work.kinds[1]

    @property
    def step_s(self) -> float:
        """Measured seconds of a step."""
        return self.workload.step_tokens / self.measured / self.choice.devices


def cost_of(case: Case, devices: Mapping[str, DeviceType]) -> StepCost:
    """Return the cost that the planner states for the row's layout. Raises DataError, with the
    row's place, for a layout that the planner refuses."""
    try:
        return Evaluator(Problem(case.workload, case.cluster, devices)).cost(case.choice)
    except UserError as error:
        raise DataError(error.message, where=case.place, remedy=error.remedy) from None


def predicted(case: Case, devices: Mapping[str, DeviceType]) -> float:
    """Return the tokens/s of one device that the planner predicts."""
    return case.workload.step_tokens / cost_of(case, devices).step_s / case.choice.devices


def with_efficiency(device: DeviceType, precision: str, constants: Efficiency) -> DeviceType:
    """Return the device with other constants in one precision."""
    return replace(device, efficiency={**device.efficiency, precision: constants})
