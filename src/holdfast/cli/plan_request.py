"""What `holdfast plan` is asked: a run, machines, and the plan that was made for both."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from holdfast.api.start import SCREEN
from holdfast.config.loading.load import LoadedConfig, load_config
from holdfast.errors import ConfigError, LayoutError
from holdfast.launch.start.data import with_prepared_vocabulary
from holdfast.launch.start.facts import Facts
from holdfast.launch.start.machine import by_device
from holdfast.machine.hardware import HardwareInfo, detect_hardware
from holdfast.plan.auto.machines import Machines, machines_of
from holdfast.plan.auto.plan_cache import PlanCache, plan_cache_folder
from holdfast.plan.auto.search_run import RunPlan, plan_run, why_not_searched
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.explain.figures import Figures, figures_of, model_flops
from holdfast.plan.search.search import Found


@dataclass(frozen=True)
class PlanRequest:
    """loaded: the run with the chosen layout left open. notes: for the reader, before the plan.
    cache: of earlier plans."""

    loaded: LoadedConfig
    machines: Machines
    plan: RunPlan
    notes: tuple[str, ...]
    cache: PlanCache

    @property
    def problem(self) -> Problem:
        return self.plan.problem

    def figures(self, found: Found) -> Figures:
        return figures_of(self.problem, found.choice, found.cost, model_flops(self.loaded.config))


def read_plan_request(
    run_file: Path, overrides: list[str], cluster: str, hardware: HardwareInfo | None = None
) -> PlanRequest:
    """Load a run file and plan its run. Raises UserError."""
    hardware = hardware or detect_hardware()
    loaded, notes = load_for_plan(run_file, overrides)
    elsewhere = cluster or loaded.config.plan.cluster
    if not elsewhere or elsewhere == "here":
        loaded = loaded.with_values(by_device(loaded, Facts(hardware))).validated()
        device = loaded.config.device
        if device != "cpu" and all(each.kind != device for each in hardware.accelerators):
            raise ConfigError(
                f"device is {device}, and this machine has none",
                where=loaded.where("device"),
                remedy="name the machines, for example --cluster 8xH100-80, or use device=cpu",
            )
    machines = machines_of(loaded.config, hardware, cluster)
    cache = PlanCache(plan_cache_folder())
    plan = plan_run(loaded, machines, cache=cache)
    return PlanRequest(loaded, machines, plan, (*notes, *cache.notes), cache)


def load_for_plan(run_file: Path, overrides: list[str]) -> tuple[LoadedConfig, list[str]]:
    """The run file with its dataset's vocabulary if that is known, and notes about it."""
    loaded, notes = load_config(run_file, overrides), list[str]()
    if (key := why_not_searched(loaded.config)) != "":
        raise LayoutError(
            f"{key} is beyond the planner, which knows the built-in decoder in synchronous layouts",
            where=str(run_file),
            remedy=f"remove {key.partition(' ')[0]}, or see the layout with: "
            + shlex.join(["holdfast", "layout", "show", str(run_file), *overrides]),
        )
    loaded = with_prepared_vocabulary(loaded, SCREEN)
    if loaded.config.model.vocab_size == 0:
        size = loaded.config.data.tokenizer.vocab_size
        loaded = loaded.with_planned({"model.vocab_size": size}, "data.tokenizer.vocab_size")
        notes.append(
            f"the dataset is not prepared: its vocabulary is taken for {size:,}, as "
            "data.tokenizer.vocab_size says"
        )
    return loaded, notes
