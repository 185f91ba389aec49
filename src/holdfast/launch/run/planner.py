"""The planner that a run's agents ask at every change of membership."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

from holdfast.config.run import RunConfig
from holdfast.machine.hardware import detect_hardware
from holdfast.plan.auto.machines import machines_of
from holdfast.plan.placing.interface import Planner
from holdfast.plan.placing.planner import plan_layout
from holdfast.plan.placing.searched import SearchedPlanner
from holdfast.plan.placing.topology_cost import Fleet
from holdfast.plan.search.search import Limits


def planner_of(config: RunConfig) -> Planner:
    """With `layout: auto`, the planner that searches; otherwise the simple one. Every node counts
    as one of the first pool of `plan.cluster`, or as this machine."""
    if config.layout.mode != "auto":
        return plan_layout
    machines = machines_of(config, detect_hardware())
    if machines.cores:  # workers share them
        machines = machines.with_workers(config.cluster.places or 1)
    degrees = {axis: getattr(config.layout, axis) for axis in config.layout.fixed}
    fleet = Fleet(machines.devices, machines.cluster.pools[0])
    return SearchedPlanner(fleet, Limits(**degrees), later=_in_a_thread)


def _in_a_thread(work: Callable[[], None]) -> None:
    Thread(target=work, name="next plans", daemon=True).start()
