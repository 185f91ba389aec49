"""`layout: auto`: the planner chooses the layout of a run, within what the run file gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.config.loading.load import LoadedConfig, PlannedValue, PlannedValues
from holdfast.config.run import RunConfig
from holdfast.config.sections.train import TrainConfig
from holdfast.errors import ConfigError
from holdfast.events import Event
from holdfast.launch.start.facts import AutoLayout, Facts
from holdfast.layout import AXES, Topology
from holdfast.machine.hardware import HardwareInfo, detect_hardware
from holdfast.plan.auto.choices import given_choice
from holdfast.plan.auto.machines import Machines, machines_of
from holdfast.plan.auto.objective import end_in_words
from holdfast.plan.auto.plan_cache import PlanCache, plan_cache_folder
from holdfast.plan.auto.prediction import Predictor, has_prediction
from holdfast.plan.auto.search_run import (
    RunPlan,
    free_values,
    is_given,
    named_microbatch,
    plan_run,
    why_not_searched,
    with_plan,
)
from holdfast.plan.cost.evaluate import Evaluator, Problem
from holdfast.plan.cost.run_workload import workload_of
from holdfast.plan.explain.figures import Figures, figures_of, model_flops, words_of_layout
from holdfast.plan.hardware.cluster_file import HERE
from holdfast.plan.memory.activations import without_estimate
from holdfast.plan.memory.microbatch_size import choose_microbatch_size
from holdfast.plan.search.limits import SEARCHED
from holdfast.report.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_si,
)


def choose_layout(loaded: LoadedConfig, facts: Facts) -> AutoLayout:
    """Choose the layout of a run that leaves it open.

    The vocabulary and the device must be known. The same input gives the same layout. A microbatch
    that the stored run has is kept. Raises UserError if no layout fits."""
    if loaded.config.layout.mode != "auto":
        return _price_of_given(loaded.config, facts.hardware)
    values: dict[str, PlannedValue] = {}
    if not is_given(loaded, "layout.fixed"):
        keys = (*AXES, "workers")
        fixed = tuple(key for key in keys if is_given(loaded, f"layout.{key}"))
        values["layout.fixed"] = (fixed, "what the run file gives")
    if reason := _why_no_plan(loaded, facts.several):
        workers = format_plural(loaded.config.layout.workers, "worker")
        line = f"layout.mode auto: {reason}; it has {workers}"
        if not facts.several and loaded.origins["layout.workers"].kind == "planned":
            place = loaded.origins["layout.workers"].place
            line += f" ({place}; layout.workers=N gives another number)"
        if loaded.origins[KEY].kind == "default":
            usual: int = TrainConfig.model_fields["microbatch_size"].default
            values[KEY] = (stored_microbatch_size(facts) or usual, "what is usual")
        return AutoLayout((line,), values=values)
    if not named_microbatch(loaded) and (size := stored_microbatch_size(facts)):
        values[KEY] = (size, "that of the run")
    loaded = loaded.with_values(values)
    number = loaded.config.layout.workers if facts.several else 0
    # All nodes choose the same.
    cache = PlanCache(plan_cache_folder(), starts_warm=not facts.several)
    machines = machines_of(loaded.config, facts.hardware)
    plan = plan_run(loaded, machines, workers=number, cache=cache)
    tried, objective = plan.result.tried, loaded.config.plan.objective
    reason = (
        f"{plan.machines.name}: the best of {format_plural(tried, 'layout')}, {plan.result.source}"
    )
    planned, found = with_plan(loaded, plan, reason)
    values |= {key: (value, reason) for key, value in free_values(loaded, found.choice).items()}
    loaded = planned
    figures = figures_of(plan.problem, found.choice, found.cost, model_flops(loaded.config))
    usd = figures.usd_of(loaded.config.train.steps)
    words = words_of_layout(found.choice, plan.problem.cluster)
    best = (
        f"the best by {objective} of {tried:,} layouts" if tried > 1 else "the only one that fits"
    )
    choice = f"layout: {words}, {best} on {plan.machines.name}{_source_in_words(plan)}"
    about = [*cache.notes, choice, *_figures_in_words(loaded.config, figures)]
    if late := end_in_words(loaded, plan.problem, found):
        about.append(late)
    return AutoLayout(tuple(about), usd, values)


def _why_no_plan(loaded: LoadedConfig, several: bool) -> str:
    """The reason why the simple planner keeps the layout of a run; "" if the search chooses it."""
    config = loaded.config
    if several and not config.plan.cluster:
        return (
            "a run on several nodes needs plan.cluster, which names them, for a layout at its "
            "begin; its agents choose one whenever nodes come or leave"
        )
    if key := why_not_searched(config):
        return f"the search does not know {key}, so the simple planner lays it out"
    return ""


def _price_of_given(config: RunConfig, hardware: HardwareInfo) -> AutoLayout:
    """What the layout of the run file costs on the machines of `plan.cluster`, if it names any."""
    if not config.plan.cluster or not has_prediction(config) or not config.train.microbatch_size:
        return AutoLayout()
    machines = machines_of(config, hardware).with_workers(config.layout.workers)
    problem = Problem(workload_of(config), machines.cluster, machines.devices)
    choice = given_choice(config, machines.cluster.pools[0].name)
    cost = Evaluator(problem).cost(choice)
    figures = figures_of(problem, choice, cost, model_flops(config))
    return AutoLayout(tuple(_figures_in_words(config, figures)), figures.usd_of(config.train.steps))


def refuse_absent_machines(before: LoadedConfig, loaded: LoadedConfig, facts: Facts) -> None:
    """Raises ConfigError for a start on this machine whose layout is planned for larger ones.
    before: without what is planned."""
    cluster, hardware = loaded.config.plan.cluster, facts.hardware
    is_planned = loaded.config.layout.mode == "auto" and not is_given(before, "layout.workers")
    if facts.several or cluster in ("", HERE) or not is_planned:
        return
    workers = loaded.config.layout.workers
    kind = loaded.config.device
    here = sum(each.kind == kind for each in hardware.accelerators) or hardware.cores
    if workers > here:
        raise ConfigError(
            f"the layout for plan.cluster {cluster} has {workers} workers, and this machine "
            f"({hardware.node}) has {format_plural(here, f'{kind} device')}",
            where=loaded.where("plan.cluster"),
            remedy="leave plan.cluster out to train here, or see the plan with: holdfast plan "
            f"{loaded.name} --cluster {cluster}",
        )


def _source_in_words(plan: RunPlan) -> str:
    return "" if plan.result.source == SEARCHED else f", {plan.result.source}"


def _figures_in_words(config: RunConfig, figures: Figures) -> list[str]:
    rate = format_si(figures.tokens_per_second)
    # the devices of this run may differ from those
    where = " on the devices of plan.cluster" if config.plan.cluster not in ("", HERE) else ""
    lines = [
        f"planned: {format_duration(figures.step_s)} a step{where}, {rate} tokens/s, "
        f"{format_bytes(figures.peak_bytes)} of {format_bytes(figures.room)} on a device"
    ]
    if figures.usd_per_hour is not None:
        lines.append(
            f"cost: ${figures.usd_of(config.train.steps):,.2f} for "
            f"{format_count(config.train.steps)} steps, at ${figures.usd_per_hour:,.2f} an hour"
        )
    return lines


def source_of_plan(loaded: LoadedConfig) -> str:
    """Return the source of a planned layout, in words; "" if the run file gives it."""
    if loaded.config.layout.mode != "auto":
        return ""
    planned = (
        origin.place
        for key, origin in loaded.origins.items()
        if key.startswith("layout.") and key != "layout.fixed" and origin.kind == "planned"
    )
    return next(planned, "")


def predictor_of(config: RunConfig) -> Callable[[Topology, Mapping[str, str]], Event | None]:
    """Return what predicts the steps of this run's generations, on machines like this one or on
    those of `plan.cluster`. It returns None for a run that no model covers."""
    if not has_prediction(config):
        return lambda topology, cores: None
    machines: list[Machines] = []

    def predict(topology: Topology, cores_by_node: Mapping[str, str]) -> Event:
        if not machines:  # looked for once, and by the leading agent alone
            machines.append(machines_of(config, detect_hardware()))
        return Predictor(config, machines[0])(topology, cores_by_node)

    return predict


KEY = "train.microbatch_size"


def by_microbatch_size(loaded: LoadedConfig, facts: Facts) -> PlannedValues:
    """Return a microbatch if the run file leaves it open: that of the run that continues, or the
    largest that fits. Samples of a step are dealt in microbatches, so a run keeps its size.

    The vocabulary must be known. Raises ConfigError if nothing says how much memory there is, if no
    formula says how much is needed, or if none fits."""
    config = loaded.config
    if config.train.microbatch_size:
        return {}
    if size := stored_microbatch_size(facts):
        return {KEY: (size, "that of the run")}
    if key := without_estimate(config):
        raise ConfigError(
            f"{KEY} auto needs an estimate of the memory, and there is none with {key}",
            where=loaded.where(KEY),
            remedy=f"name a number: {KEY}=2",
        )
    if not config.model.vocab_size:
        raise ConfigError(
            f"{KEY} auto needs the vocabulary, and the dataset is not prepared",
            where=loaded.where(KEY),
            remedy="name it with model.vocab_size=32000, or prepare: holdfast data prepare",
        )
    limit = loaded.config.train.memory.limit
    if not limit and loaded.config.device not in ("cpu", "auto"):
        limit = min((each.memory_bytes for each in facts.hardware.accelerators), default=0)
        limit //= config.cluster.workers_per_device
    if not limit:
        raise ConfigError(
            f"{KEY} auto needs a limit, and the device {loaded.config.device} has none that is "
            "known",
            where=loaded.where(KEY),
            remedy=f"name one with train.memory.device_gb=4, or a number: {KEY}=2",
        )
    found, least = choose_microbatch_size(config, limit)
    if found is None:
        raise ConfigError(
            f"no microbatch fits: one of {format_plural(least.size, 'sample')} needs "
            f"{format_bytes(least.peak)} on a rank, and there are {format_bytes(limit)}",
            where=loaded.where(KEY),
            remedy=f"use train.memory.device_gb={-(-least.peak // 10**5) / 10**4:g} or more",
        )
    reason = f"{format_bytes(found.peak)} of {format_bytes(limit)} on a rank, by the estimate"
    return {KEY: (found.size, reason)}


def describe_microbatch(loaded: LoadedConfig) -> list[str]:
    """A line for a size that was chosen."""
    origin = loaded.origins.get(KEY)
    if origin is None or origin.kind != "planned":
        return []
    return [f"{KEY} is {loaded.config.train.microbatch_size}: {origin.place}"]


def stored_microbatch_size(facts: Facts) -> int:
    """Return that of the run that continues; 0 if there is none."""
    size = facts.stored_config.get("train", {}).get("microbatch_size")
    return size if isinstance(size, int) else 0
