"""The run file's degrees -> one Layout for each replica, with the stages of its pipeline.

Rules that the run file alone decides were checked when it was read (`config/sections/degrees.py`).
Here are the rules that depend on the dealing. They need the number of microbatches of every step,
batch warm-up included, and how many of them each replica gets
(`core.sharding.reduction_tree.deal`).
"""

from __future__ import annotations

from holdfast.config.run import RunConfig
from holdfast.config.sections.layout import DegreesConfig, LayoutConfig
from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.core.sharding.reduction_tree import deal
from holdfast.errors import LayoutError
from holdfast.layout import Layout
from holdfast.plan.placing.balance import planned_stages
from holdfast.plan.step_microbatches import microbatches


def layouts_of(config: RunConfig) -> tuple[Layout, ...]:
    """One Layout (dp_replicate 1) for each replica, in their order.

    Raises LayoutError if the workers are not planned yet, or if a replica would get too few
    microbatches. The error has the key as its place and the nearest values that work.
    """
    check_dealing_of_steps(config)
    layouts: dict[DegreesConfig, Layout] = {}
    replicas = [degrees for _, degrees in replicas_of(config.layout)]
    for degrees in replicas:
        if degrees not in layouts:
            mesh, is_folded = degrees.mesh_shape, degrees.pp > 1 and config.layout.is_folded
            stages = degrees.stages or planned_stages(config, mesh)
            layouts[degrees] = Layout.of_mesh(mesh, stages, is_folded=is_folded)
    return tuple(layouts[degrees] for degrees in replicas)


def replicas_of(layout: LayoutConfig) -> tuple[tuple[str, DegreesConfig], ...]:
    """(key in the run file, degrees) of each replica. Raises LayoutError for 0 workers."""
    if layout.replicas:
        return layout.kinds
    if not layout.workers:
        raise LayoutError(
            "the number of workers has not been planned",
            where="layout.workers",
            remedy=f"use a multiple of {layout.ranks}",
        )
    return layout.kinds * (layout.workers // layout.ranks)


def max_workers(config: RunConfig, workers: int) -> int:
    """Return at most `workers`, in complete replicas that all have work, but at least one replica.

    For equal replicas; unlike ones are as many as the run file says.
    """
    layout = config.layout
    if layout.replicas:
        return layout.least_workers
    each = SCHEDULE_KINDS[layout.schedule].least_microbatches(layout.pp)
    busy = min(microbatches(config).values()) // each
    return max(1, min(workers // layout.ranks, busy)) * layout.ranks


def check_dealing_of_steps(config: RunConfig) -> None:
    """Raises LayoutError when a step leaves a replica without work, or too little of it."""
    replicas = replicas_of(config.layout)
    by_number = sorted(microbatches(config).items(), key=lambda item: item[1])
    step, least = by_number[0]
    if least < len(replicas):
        raise _idle_replica_error(config, step, least, len(replicas))
    name = config.layout.schedule
    kind = SCHEDULE_KINDS[name]
    for step, number in by_number:
        shares = deal(number, len(replicas))
        for index, ((key, degrees), share) in enumerate(zip(replicas, shares, strict=True)):
            needed = kind.least_microbatches(degrees.pp)
            if len(share) < needed:
                raise LayoutError(
                    f"{key}.pp {degrees.pp} under {name} needs {needed} microbatches a replica, "
                    f"but step {step} has {number}, of which replica {index} gets {len(share)}",
                    where=f"{key}.pp",
                    remedy=_pipeline_remedy(config, key, degrees, least),
                )


def _idle_replica_error(config: RunConfig, step: int, least: int, replicas: int) -> LayoutError:
    layout, micro = config.layout, config.train.microbatch_size
    if layout.replicas:
        what, where = f"layout.replicas names {replicas} replicas", "layout.replicas"
        remedy = f"use {least} replicas or fewer"
    else:
        what, where = f"layout.workers {layout.workers} make {replicas} replicas", "layout.workers"
        most = max_workers(config, layout.workers)
        remedy = f"use {most} worker{'s' if most > 1 else ''} or fewer"
    work = f"step {step} has {least} microbatch{'es' if least > 1 else ''} of {micro} samples"
    if config.outer.is_on:
        work = f"outer.learners is {least}"
    return LayoutError(
        f"{what}, but {work}, so {replicas - least} would have nothing to do",
        where=where,
        remedy=remedy,
    )


def _pipeline_remedy(config: RunConfig, key: str, degrees: DegreesConfig, least: int) -> str:
    """Return remedies that give every pipeline enough: another schedule, a shorter one, fewer
    replicas."""
    layout, kind = config.layout, SCHEDULE_KINDS[config.layout.schedule]
    offers = ["layout.schedule=gpipe"]
    if layout.stages_a_worker > 1 and degrees.stages:
        offers[0] += f" with {key}.stages=[]"
    one = degrees.ranks // degrees.pp  # ranks of a stage
    needed = max(1, kind.least_a_rank)  # microbatches for each of them
    if layout.replicas:
        pp = least // len(layout.replicas) // needed
        workers = layout.least_workers - (degrees.pp - pp) * one
        return f"use {offers[0]} or {_shorter_pipeline_remedy(key, degrees, pp, workers)}"
    for pp in range(degrees.pp - 1, 0, -1):
        ranks = one * pp
        share = least // (layout.workers // ranks)
        if layout.workers % ranks == 0 and share >= kind.least_microbatches(pp):
            offers.append(_shorter_pipeline_remedy(key, degrees, pp))
            break
    else:
        if least < kind.least_microbatches(degrees.pp):
            # nor are fewer replicas enough: one with a shorter pipeline is
            pp = max(1, least // needed)
            offers.append(_shorter_pipeline_remedy(key, degrees, pp, pp * one))
    if fewer := least // kind.least_microbatches(degrees.pp):
        offers.append(f"layout.workers {fewer * degrees.ranks}")
    return "use " + (", ".join(offers[:-1]) + " or " if len(offers) > 1 else "") + offers[-1]


def _shorter_pipeline_remedy(key: str, degrees: DegreesConfig, pp: int, workers: int = 0) -> str:
    """Return a remedy: a shorter pipeline and the changes that it requires. These are the number of
    workers, if one is given, and the stages that the run file names."""
    changes = [f"layout.workers {workers}"] if workers else []
    changes += [f"{key}.stages=[]"] if degrees.stages else []
    return f"{key}.pp {pp}" + (f" with {' and '.join(changes)}" if changes else "")
