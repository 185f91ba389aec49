"""What a start finds out about its machine, its launcher and its run, before it plans values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.data.stream.dataset import Dataset
from holdfast.launch.ranks.launchers import LauncherPlace
from holdfast.machine.hardware import HardwareInfo


@dataclass(frozen=True)
class AutoLayout:
    """What the planner says at the start of a run."""

    about: tuple[str, ...] = ()  # lines for the user; none if the run file gives the layout
    usd: float = 0.0  # price of the run's steps; 0 if it is unknown
    values: PlannedValues = field(default_factory=dict)  # what it chose


@dataclass(frozen=True)
class Facts:
    """What resolvers plan values from. A field is None until its stage has asked."""

    hardware: HardwareInfo  # of this machine
    environ: Mapping[str, str] = field(default_factory=dict)  # variables of this process
    launcher: LauncherPlace | None = None  # what torchrun, mpirun or srun says; None without one
    several: bool = False  # the run has several nodes
    stored: Mapping[str, Any] | None = None  # resolved.json of the run to continue, if there is one
    task: PlannedValues = field(default_factory=dict)  # the task's answer
    named: PlannedValues = field(default_factory=dict)  # of classes that the run file names
    dataset: Dataset | None = None  # prepared and checked; None if the task has its own data
    base: PlannedValues = field(default_factory=dict)  # folders of adapters, and their checksums
    layout: AutoLayout = AutoLayout()  # what the planner chose

    def of_nodes(self, loaded: LoadedConfig) -> Facts:
        """Return the same for a run whose node is planned: with a name, it is one of several."""
        return replace(self, several=bool(loaded.config.cluster.node))

    @property
    def stored_config(self) -> Mapping[str, Any]:
        """The values of the run to continue; none for a new one."""
        values: Mapping[str, Any] = (self.stored or {}).get("config", {})
        return values
