"""What a start finds out about its machine, its launcher and its run, before it plans values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from holdfast.config.loading.load import LoadedConfig, PlannedValues
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
    """What resolvers plan values from."""

    hardware: HardwareInfo  # of this machine
    environ: Mapping[str, str] = field(default_factory=dict)  # variables of this process
    launcher: LauncherPlace | None = None  # what torchrun, mpirun or srun says; None without one
    several: bool = False  # the run has several nodes
    stored: Mapping[str, Any] | None = None  # resolved.json of the run to continue, if there is one
    layout: AutoLayout = AutoLayout()  # what the planner chose

    def of_nodes(self, loaded: LoadedConfig) -> Facts:
        """Return the same for a run whose node is planned: with a name, it is one of several."""
        return replace(self, several=bool(loaded.config.cluster.node))

    @property
    def stored_config(self) -> Mapping[str, Any]:
        """The values of the run to continue; none for a new one."""
        values: Mapping[str, Any] = (self.stored or {}).get("config", {})
        return values


Resolver = Callable[[LoadedConfig, Facts], PlannedValues]
"""A pure function. Raises UserError for values that do not go with the facts."""


def resolve(loaded: LoadedConfig, facts: Facts, resolvers: Sequence[Resolver]) -> LoadedConfig:
    """Fill in what the resolvers plan, in their order. Raises UserError."""
    for resolver in resolvers:
        loaded = loaded.with_values(resolver(loaded, facts))
    loaded.refuse_broken_rules()
    return loaded


def with_planned(loaded: LoadedConfig, values: PlannedValues) -> LoadedConfig:
    """Fill in planned values. Raises UserError for values that break a rule."""
    loaded = loaded.with_values(values)
    loaded.refuse_broken_rules()
    return loaded


class Progress(Protocol):
    """Shows how far the preparation of a dataset is."""

    def say(self, text: str) -> None: ...
    def show(self, what: str, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class Screen:
    """The outputs of a start."""

    say: Callable[[str], None]  # prints one line
    open_progress: Callable[[], AbstractContextManager[Progress]]
    confirm_cost: Callable[[LoadedConfig, float], None]  # US dollars; raises ConfigError for a no
