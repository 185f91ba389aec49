"""The search for the layout of a run: its limits are what the run file gives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

from holdfast.config.loading.load import LoadedConfig
from holdfast.config.run import RunConfig
from holdfast.config.sections.layout import PART_KEYS
from holdfast.config.sections.memory import DEVICE
from holdfast.errors import ConfigError, LayoutError, UserError
from holdfast.layout import AXES
from holdfast.options.registry import unmodelled_option
from holdfast.plan.auto.choices import values_of
from holdfast.plan.auto.machines import Machines
from holdfast.plan.auto.objective import is_allowed, rules_of
from holdfast.plan.auto.plan_cache import PlanCache
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.cost.run_workload import adapter_degrees, unmodelled_key, workload_of
from holdfast.plan.placing.layouts import layouts_of
from holdfast.plan.search.search import Found, Limits, SearchResult, search

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv")
"""Schedules that are tried: none of them changes the curve."""
MOST_BY_PART = 8
"""Devices up to which attention and feed-forward get degrees of their own. The search then looks at
26 pairs."""
_SHORT = 40  # groups of layouts that a search opens for a remedy


@dataclass(frozen=True)
class RunPlan:
    """What was chosen for a run, out of what. machines: those that its workers use."""

    problem: Problem
    machines: Machines
    result: SearchResult
    limits: Limits

    @property
    def best(self) -> Found:
        return self.result.best


def is_given(loaded: LoadedConfig, key: str) -> bool:
    """Return True if the run file or the command line gives this key."""
    return loaded.origins[key].kind in ("file", "command line")


def why_not_searched(config: RunConfig) -> str:
    """The key that keeps a run from the search, with its value; "" if it can be searched."""
    if key := unmodelled_key(config)[0]:
        return key
    if config.layout.stages:
        return "layout.stages"
    if len(config.train.recompute_words) > 1:
        return "train.recompute of each stage"
    return unmodelled_option(config)


def named_microbatch(loaded: LoadedConfig) -> int:
    """The microbatch that the run file gives, or that a stored run has; 0: it is searched."""
    is_open = loaded.origins["train.microbatch_size"].kind == "default"
    return 0 if is_open else loaded.config.train.microbatch_size


def limits_of(loaded: LoadedConfig, *, has_host: bool = False) -> Limits:
    """What the run file fixes: keys of `layout`, recompute and microbatch that it gives. has_host:
    devices have a memory of their own, so state may be on the host."""
    config = loaded.config
    layout, train = config.layout, config.train

    def fixed(key: str) -> int:
        value: int = getattr(layout, key)
        return value if is_given(loaded, f"layout.{key}") else 0

    given_words = is_given(loaded, "train.recompute")
    degrees = {axis: fixed(axis) for axis in AXES} | adapter_degrees(config)
    zero = (layout.zero_in_memory,) if is_given(loaded, "layout.zero") else (1, 2, 3)
    return Limits(
        ep=fixed("ep"),
        microbatch=named_microbatch(loaded),
        zero=(1,) if config.lora.rank else zero,  # shards hold no part of the base
        schedules=(layout.schedule,) if is_given(loaded, "layout.schedule") else SCHEDULES,
        virtual=fixed("virtual_stages"),
        sequence_parallel=layout.sequence_parallel,
        recompute=(train.recompute_words[0],) if given_words else ("none", "selective", "full"),
        offloads=_offloads(loaded, has_host),
    ).with_degrees(degrees)


def _offloads(loaded: LoadedConfig, has_host: bool) -> tuple[frozenset[str], ...]:
    """Places of the optimizer's state: that of the run file, or both."""
    train, key = loaded.config.train, "train.memory.optimizer"
    moved, kept = frozenset({"optimizer"}), frozenset[str]()
    if is_given(loaded, key) or train.optimizer.name_with_state != "adamw":
        return (kept if train.memory.optimizer == DEVICE else moved,)
    return (kept, moved) if has_host else (kept,)


def plan_run(
    loaded: LoadedConfig,
    machines: Machines,
    workers: int = 0,
    now: datetime | None = None,
    cache: PlanCache | None = None,
) -> RunPlan:
    """Choose the layout of a run on these machines. workers: their number, if it is not free.
    now: for an objective with a date. cache: of earlier plans. Raises LayoutError if no layout
    works there."""
    cache = cache or PlanCache(None)
    config, limits = loaded.config, limits_of(loaded, has_host=not machines.cores)
    given = config.layout.workers if is_given(loaded, "layout.workers") else workers
    workload = workload_of(_with_vocabulary(config))
    plans, refused = list[RunPlan](), list[UserError]()
    for number in machines.worker_counts(given, *limits.mesh):
        part = machines.with_workers(number)
        if part.cluster.size != number:
            raise LayoutError(
                f"layout.workers is {number}, and {machines.name} has "
                f"{machines.cluster.size} devices",
                where=loaded.where("layout.workers"),
                remedy=f"use {part.cluster.size}",
            )
        share = config.plan.memory_share
        problem = Problem(workload, part.cluster, part.devices, memory_share=share)
        try:
            own = replace(
                limits,
                devices=number if given or machines.cores else 0,
                by_part=part.cluster.size <= MOST_BY_PART and _may_cut_by_part(loaded),
            )
            result = cache.search(problem, own, rules_of(loaded, problem, now))
            plans.append(RunPlan(problem, part, result, limits))
        except LayoutError as error:
            refused.append(_more_workers(loaded, machines, number, limits) or error)
    if not plans:
        raise refused[0]
    return min(plans, key=lambda plan: plan.best.score)


def _may_cut_by_part(loaded: LoadedConfig) -> bool:
    """Return True if the run file leaves `layout.tp` and its parts open, and the run allows lower
    degrees of parts."""
    config = loaded.config
    section = PART_KEYS[0].partition(".")[0]
    keys = [f"layout.{key}" for key in (*PART_KEYS, section, "tp")]
    is_open = not any(key in loaded.origins and is_given(loaded, key) for key in keys)
    return is_open and config.train.precision != "fp8" and config.layout.quantized == "none"


def _more_workers(
    loaded: LoadedConfig, machines: Machines, given: int, limits: Limits
) -> LayoutError | None:
    """The error that names a number of workers that works, if the machines have more devices than
    the run file takes."""
    config = loaded.config
    if machines.cores or given >= machines.cluster.size:
        return None
    workload, share = workload_of(_with_vocabulary(config)), config.plan.memory_share
    allows = partial(is_allowed, config)
    problem = Problem(workload, machines.cluster, machines.devices, memory_share=share)
    try:
        number = search(problem, replace(limits, effort=_SHORT), allows=allows).best.choice.devices
        part = machines.with_workers(number)
        problem = replace(problem, cluster=part.cluster)
        search(problem, replace(limits, devices=number, effort=_SHORT), allows=allows)
    except LayoutError:
        return None
    return LayoutError(
        f"no layout fits {workload.name} on {given} device{'s' * (given > 1)}",
        where=loaded.where("layout.workers"),
        remedy=f"use layout.workers={number}",
    )


def _with_vocabulary(config: RunConfig) -> RunConfig:
    """The run with the vocabulary that its tokenizer is asked for, if its own is not known yet."""
    if config.model.vocab_size:
        return config
    size = config.data.tokenizer.vocab_size
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})})


def with_plan(loaded: LoadedConfig, plan: RunPlan, reason: str) -> tuple[LoadedConfig, Found]:
    """The configuration with the best layout that all rules of a run allow, and that layout."""
    refused: list[UserError] = []
    for found in (plan.best, *plan.result.runners_up):
        values = free_values(loaded, found.choice)
        planned = loaded.with_values({key: (value, reason) for key, value in values.items()})
        try:
            planned.refuse_broken_rules()
            layouts_of(planned.config)
            return planned, found
        except (ConfigError, LayoutError) as error:
            refused.append(error)
    raise refused[0]


def free_values(loaded: LoadedConfig, choice: Choice) -> dict[str, Any]:
    """Keys that the run file leaves open, with the values of a layout."""
    chosen = values_of(choice)
    values = {key: value for key, value in chosen.items() if not is_given(loaded, key)}
    if named_microbatch(loaded):
        values.pop("train.microbatch_size", None)
    else:
        values["train.microbatch_size"] = choice.microbatch
    if not choice.is_sharded:
        values.pop("layout.zero", None)
    return values
