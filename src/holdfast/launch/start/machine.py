"""What the machine and the launcher decide of a run, and what neither of them can do."""

from __future__ import annotations

import os
import platform

from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.errors import ConfigError, LayoutError
from holdfast.launch.node.devices import default_places, refuse_devices, refuse_float8
from holdfast.launch.node.node_place import by_place
from holdfast.launch.run.task_run import ask_task
from holdfast.launch.start.facts import Facts, Resolver, resolve
from holdfast.layout import Layout
from holdfast.machine.hardware import HardwareInfo, cpp_compiler
from holdfast.plan.placing.layouts import layouts_of, max_workers


def by_launcher(loaded: LoadedConfig, facts: Facts) -> PlannedValues:
    """Return what the launcher decides: workers, and name and places of this node.

    Raises ConfigError if the run file says something else."""
    place = facts.launcher
    if place is None:
        return {}
    planned: dict[str, str | int] = {"layout.workers": place.world}
    if place.local_world < place.world:
        planned |= {"cluster.places": place.local_world, "cluster.node": place.node}
    given = loaded.config
    said = {
        "layout.workers": given.layout.workers,
        "cluster.places": given.cluster.places,
        "cluster.node": given.cluster.node,
    }
    for key, value in planned.items():
        if said[key] and said[key] != value:
            raise ConfigError(
                f"{key} is {said[key]}, and {place.launcher} says {value}",
                where=loaded.where(key),
                remedy=f"leave it out, or use {value}",
            )
    return {key: (value, f"what {place.launcher} says") for key, value in planned.items()}


def by_device(loaded: LoadedConfig, facts: Facts) -> PlannedValues:
    """Return this machine's device if the run leaves it open."""
    if loaded.config.device != "auto":
        return {}
    accelerators = facts.hardware.accelerators
    device = accelerators[0].kind if accelerators else "cpu"
    return {"device": (device, f"{len(accelerators)} accelerators on {facts.hardware.node}")}


def by_number_of_devices(loaded: LoadedConfig, facts: Facts) -> PlannedValues:
    """Return the number of workers if the run leaves it open. The device is known."""
    if loaded.config.layout.workers:
        return {}
    places, why = default_places(loaded.config, facts.hardware)
    return {"layout.workers": (max_workers(loaded.config, places), why)}


def refuse_unfit_machine(loaded: LoadedConfig, machine: HardwareInfo) -> None:
    """Raises ConfigError for what this machine cannot do. Its device is known."""
    refuse_devices(loaded, machine)
    refuse_float8(loaded, machine)
    config = loaded.config
    if config.train.compile and config.device == "cpu" and cpp_compiler(os.environ) is None:
        raise ConfigError(
            "train.compile needs a C++ compiler on a CPU, and there is none on the PATH",
            where=loaded.where("train.compile"),
            remedy="install g++, name another in CXX, or use train.compile=false",
        )
    if platform.system() == "Darwin" and config.layout.workers > 1:
        raise ConfigError(
            "on macOS one worker is supported", where=loaded.where("layout.workers"), remedy="use 1"
        )


def checked_layouts(loaded: LoadedConfig) -> tuple[Layout, ...]:
    """Return one Layout for each replica. Raises LayoutError at the line of the run file, or the
    override, that asks for what cannot work."""
    try:
        return layouts_of(loaded.config)
    except LayoutError as error:
        where = loaded.where(error.where or "layout.workers")
        raise LayoutError(error.message, where=where, remedy=error.remedy) from None


BY_MACHINE: tuple[Resolver, ...] = (by_launcher, by_device, by_number_of_devices, by_place)


def plan_for_machine(loaded: LoadedConfig, facts: Facts) -> LoadedConfig:
    """Fill in what the run file leaves to the machine and its launcher. It is not validated yet.

    Raises ConfigError for what this machine cannot do, LayoutError for what no machine can.
    """
    loaded = resolve(loaded, facts, BY_MACHINE)
    refuse_unfit_machine(loaded, facts.hardware)
    try:
        checked_layouts(loaded)
    except LayoutError:
        config = loaded.config
        if config.task.name and config.layout.pp > 1:
            # with more stages than the task has blocks, the remedies of the error do not work
            loaded.with_values(ask_task(loaded)).validated()
        raise
    return loaded
