"""`holdfast layout`: how a model is spread, drawn before anything starts.

`show` draws which rank holds what, `schedule` the order of work of one pipeline.
"""

from __future__ import annotations

import platform
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.api.start import SCREEN
from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, Overrides, RunFile, refuse_beside
from holdfast.config.loading.load import LoadedConfig, load_config
from holdfast.config.run import RunConfig
from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.config.sections.task import refuse_task
from holdfast.core.schedule.check import check_schedule
from holdfast.core.schedule.csv import from_csv, to_csv
from holdfast.core.schedule.draw import draw_svg as picture
from holdfast.core.schedule.draw import draw_text as drawing
from holdfast.core.schedule.named import SCHEDULES, build_schedule
from holdfast.core.schedule.table import Schedule
from holdfast.core.schedule.timing import Durations, Timeline, time_schedule
from holdfast.core.sharding.reduction_tree import deal
from holdfast.errors import ConfigError, UserError, unknown_name
from holdfast.launch.run.auto_layout import describe_microbatch
from holdfast.launch.run.lora_run import refuse_bare_stages
from holdfast.launch.start.data import SMALLEST, plan_to_look, with_prepared_vocabulary
from holdfast.launch.start.machine import checked_layouts
from holdfast.layout import Replica, Topology, place_replicas
from holdfast.plan.memory.activations import activations_of, device_kind, has_formula
from holdfast.plan.memory.communicators import BYTES_EACH, communicators_by_rank
from holdfast.plan.memory.memory_use import contents_by_rank
from holdfast.plan.memory.placed_memory import placed_by_rank
from holdfast.plan.placing.balance import times_of_stages
from holdfast.plan.placing.loss_impact import LossImpact, impact_of_loss
from holdfast.plan.step_microbatches import microbatches
from holdfast.report.formatting import format_plural
from holdfast.show import layout_distance
from holdfast.show.layout_estimate import estimates_as_json, stages_as_json
from holdfast.show.layout_picture import LayoutPicture
from holdfast.show.output import print_json, say, write_text

MAX_DRAWN_ACTIONS = 200_000  # of a drawing: more cannot be told apart
TIME_BOUNDS = (1e-9, 1e9)  # least and most, apart from 0: sums and ratios stay far from overflow

app = make_app("Show how a model is spread over workers, before anything starts.")
app.command()(layout_distance.distance)

Weighted = tuple[Schedule, tuple[float, ...]]
"""A table to draw, and the share of every stage in the model's time (mean 1)."""


@app.command()
def schedule(
    run_file: Annotated[
        Path | None, typer.Argument(help="take stages and microbatches from this run file")
    ] = None,
    overrides: Overrides = None,
    name: Annotated[
        str | None, typer.Option("--schedule", help=f"one of {', '.join(SCHEDULES)}; none: 1f1b")
    ] = None,
    stages: Annotated[
        int | None, typer.Option(min=1, max=1024, help="all stages; none: those of 4 ranks")
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, max=65536, help="microbatches of a step; none: 8")
    ] = None,
    virtual: Annotated[int | None, typer.Option(min=1, help="stages a rank; none: usual")] = None,
    replica: Annotated[int, typer.Option(min=0, help="which replica of the run file")] = 0,
    forward: Annotated[
        str | None, typer.Option(help="time of a forward: one, or one a stage as 1,1,2,1")
    ] = None,
    backward: Annotated[
        str | None, typer.Option(help="time of a backward; none: twice the forward")
    ] = None,
    send: Annotated[float, typer.Option(help="time of a transfer between two ranks")] = 0.0,
    svg: Annotated[Path | None, typer.Option(help="write the drawing as SVG")] = None,
    csv: Annotated[Path | None, typer.Option(help="write the table as CSV")] = None,
    from_csv: Annotated[Path | None, typer.Option(help="draw this table instead")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the numbers as JSON")] = False,
) -> None:
    """Draw a pipeline's order of work, timed.

    F0 is the forward of microbatch 0, B0 its backward. A table in CSV may split a backward into I
    (gradient of the input) and W (of the weights). The bubble is the share of time in which a rank
    computes nothing. In flight is the most microbatches whose activations it keeps at once.

    Every table is first proved to be complete, in order and free of deadlock. CSV is the form that
    torch.distributed.pipelining reads and writes: a row a rank, a cell an action, as 2F0.

    With a run file, stages take the time of their blocks (in FLOPs; 1 is the mean of a forward)
    unless --forward says otherwise.

    \b
    Example:
      holdfast layout schedule --stages 4 --microbatches 8
      holdfast layout schedule --schedule gpipe --forward 1,1,1,1.5 --send 0.1 --svg gpipe.svg
      holdfast layout schedule run.yaml layout.pp=2 --csv table.csv
      holdfast layout schedule --from-csv table.csv
    """
    sizes: dict[str, Any] = {"--stages": stages, "--virtual": virtual}
    if from_csv is not None:
        sizes |= {"a run file": run_file, "--schedule": name, "--microbatches": microbatches}
        refuse_beside("--from-csv", {**sizes, "--replica": replica or None})
        table, weights = _read_table(from_csv)
    elif run_file is not None:
        refuse_beside("a run file", sizes)
        table, weights = _schedule_of_run(
            run_file, list(overrides or []), name, microbatches, replica
        )
    else:
        refuse_beside("options without a run file", {"--replica": replica or None})
        table, weights = _schedule_by_name(name or "1f1b", stages, microbatches or 8, virtual)
    stages = table.stages
    ahead = weights if forward is None else _times("--forward", forward, stages)
    back = (
        tuple(2 * time for time in ahead)
        if backward is None
        else _times("--backward", backward, stages)
    )
    if not _is_time(send):
        raise ConfigError(
            f"{send} is no time that can be drawn", where="--send", remedy=f"use {_RANGE}"
        )
    found = time_schedule(table, Durations(ahead, back, send=send))
    if json:
        print_json(_numbers(table, found))
    else:
        print(drawing(table, found, _columns(table)), flush=True)
    if svg is not None:
        write_text(svg, picture(table, found))
    if csv is not None:
        write_text(csv, to_csv(table))


def _schedule_by_name(
    name: str, stages: int | None, microbatches: int, asked: int | None
) -> Weighted:
    """A schedule by its name. asked: stages on each rank. Raises UserError, with the option as its
    place."""
    kind = SCHEDULE_KINDS.get(name)
    virtual = asked or (kind.usual_virtual if kind else 1)
    if kind and asked == 1 < kind.virtual:
        raise ConfigError(
            f"the schedule {name} has {kind.virtual} stages on each rank, not 1",
            where="--virtual",
            remedy=f"use --virtual {kind.virtual}",
        )
    stages = stages or 4 * virtual
    if stages % virtual:
        raise ConfigError(
            f"{stages} stages are not {virtual} on each rank",
            where="--virtual" if asked else "--stages",
            remedy=f"use --stages {-(-stages // virtual) * virtual}",
        )
    if stages * microbatches > MAX_DRAWN_ACTIONS:
        raise ConfigError(
            f"{stages} stages by {microbatches} microbatches are too many to draw",
            where="--microbatches",
            remedy=f"use {MAX_DRAWN_ACTIONS // stages} or fewer, or fewer --stages",
        )
    return (build_schedule(name, stages // virtual, microbatches, virtual), (1.0,) * stages)


def _read_table(path: Path) -> Weighted:
    """The table of a file, proved to run."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(
            f"the table cannot be read ({reason})",
            where=str(path),
            remedy="name a CSV file with a row for each rank",
        ) from None
    table = from_csv(text, path.name)
    check_schedule(table)
    return table, (1.0,) * table.stages


def _schedule_of_run(
    path: Path, overrides: list[str], name: str | None, count: int | None, which: int
) -> Weighted:
    """The pipeline of one replica, with the microbatches that the first step deals to it."""
    if name is not None:
        overrides = [*overrides, f"layout.schedule={name}"]
    loaded = load_config(path, overrides)
    refuse_task(loaded.config.task, "holdfast layout schedule", is_file=True)
    loaded, _ = plan_to_look(with_prepared_vocabulary(loaded, SCREEN))
    config, layouts = loaded.config, checked_layouts(loaded)
    if which >= len(layouts):
        raise ConfigError(
            f"there is no replica {which}", where="--replica", remedy=f"use 0 to {len(layouts) - 1}"
        )
    layout = layouts[which]
    share = len(deal(microbatches(config)[1], len(layouts))[which])
    virtual = config.layout.stages_a_worker if layout.pp > 1 else 1
    schedule = config.layout.schedule if layout.pp > 1 else "1f1b"
    table, _ = _schedule_by_name(schedule, layout.pp * virtual, count or share, virtual)
    times: tuple[float, ...] = (1.0,)
    if layout.stages:
        ranks = tuple(range(layout.replica_size))
        placed = Replica(0, ranks, layout.mesh_shape, layout.stages, 1, layout.is_folded)
        times = times_of_stages(config, placed)
    if config.model.vocab_size == 0:
        say("the dataset is not prepared: the head counts as nothing; add model.vocab_size=N")
    mean = sum(times) / len(times)
    return table, tuple(time / mean for time in times)


_RANGE = f"0, or {TIME_BOUNDS[0]:g} to {TIME_BOUNDS[1]:g}"


def _is_time(value: float) -> bool:
    return value == 0 or TIME_BOUNDS[0] <= value <= TIME_BOUNDS[1]


def _times(option: str, text: str, stages: int) -> tuple[float, ...]:
    """One time for all stages, or one for each."""
    try:
        times = tuple(float(part) for part in text.split(","))
    except ValueError:
        times = ()
    if not times or not all(0 <= time < float("inf") for time in times):
        raise ConfigError(
            f"{text!r} is not a time, nor a list of times",
            where=option,
            remedy="write 1, or one for each stage as 1,1,2",
        )
    if bad := [time for time in times if not _is_time(time)]:
        raise ConfigError(
            f"{bad[0]:g} is no time that can be drawn", where=option, remedy=f"use {_RANGE}"
        )
    if len(times) == 1:
        return times * stages
    if len(times) != stages:
        raise ConfigError(
            f"there are {len(times)} times for {stages} stages",
            where=option,
            remedy=f"give one, or {stages}",
        )
    return times


def _columns(schedule: Schedule) -> int | None:
    """Return the columns of the terminal next to names and figures; None if stdout is no
    terminal."""
    if not sys.stdout.isatty():
        return None
    beside = len(f"rank {schedule.ranks}  ") + len("  bubble 100.0%, in flight 1000")
    return max(40, shutil.get_terminal_size().columns - beside)


def _numbers(schedule: Schedule, found: Timeline) -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "ranks": schedule.ranks,
        "rank_of": schedule.rank_of,
        "microbatches": schedule.microbatches,
        "makespan": found.makespan,
        "bubble": found.bubble,
        "in_flight": found.in_flight,
    }


# --- show ----------------------------------------------------------------------------------------
@app.command()
def show(
    run_file: RunFile,
    overrides: Overrides = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="the same as layout.workers=N")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option("--nodes", help="names of the nodes: a,b; filled in order")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option("--ranks-per-node", min=1, help="ranks on each node")
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option("--what-if", help="lost=3 or lost=3,5 or lost=node:a: what would be left"),
    ] = None,
    json: Json = False,
) -> None:
    """Draw which rank holds what, on which node. Starts nothing and needs no device.

    A replica is one copy of the model: a grid of pp stages, each shared by dp_shard x tp ranks.
    Bytes are those on one rank while a step's backward runs; activations come on top.

    \b
    Example:
      holdfast layout show run.yaml
      holdfast layout show run.yaml layout.pp=2 layout.tp=2 --workers 8 --ranks-per-node 4
      holdfast layout show run.yaml --workers 8 --nodes a,b --what-if lost=node:a
    """
    loaded, notes = _read_request(run_file, list(overrides or []), workers)
    config = loaded.config
    layouts = checked_layouts(loaded)
    world = sum(layout.world_size for layout in layouts)
    topology = place_replicas(layouts, 1, nodes_of(world, nodes, ranks_per_node))
    lost = frozenset[int]() if what_if is None else parse_loss(what_if, topology)
    loss = None if what_if is None else impact_of_loss(config, topology, lost)
    for note in notes:
        say(note)
    if json:
        print_json(_as_json(config, topology, lost, loss))
    else:
        LayoutPicture(config, topology, contents_by_rank(config, topology), lost, loss).print()


def _read_request(
    run_file: Path, overrides: list[str], workers: int | None
) -> tuple[LoadedConfig, list[str]]:
    """The run file with what the command line says, the dataset's vocabulary if it is there, and
    what has to be said about it."""
    if workers is not None:
        overrides.append(f"layout.workers={workers}")
    loaded, notes = load_config(run_file, overrides), list[str]()
    refuse_task(loaded.config.task, "holdfast layout", is_file=True)
    refuse_bare_stages(loaded)
    loaded = with_prepared_vocabulary(loaded, SCREEN)
    if loaded.config.model.vocab_size == 0:
        notes.append(
            "the vocabulary is the dataset's, which is not prepared: embedding and head count as "
            "nothing here; add model.vocab_size=N to see them"
        )
    loaded, facts = plan_to_look(loaded)
    notes += facts.layout.about
    if loaded.origins["layout.workers"].place == SMALLEST:
        least = loaded.config.layout.workers
        notes.append(f"layout.workers is 0, the machine's choice: shown for {least}; see --workers")
    return loaded, [*notes, *describe_microbatch(loaded)]


def nodes_of(world: int, names: str | None, per_node: int | None) -> tuple[str, ...]:
    """The node of every rank, filled in order. Without names or a number: all on this one.

    Raises ConfigError when the ranks do not fit on the nodes, or a node would have none.
    """
    if names is None:
        if per_node is None:
            return (platform.node() or "localhost",) * world
        return tuple(f"node{rank // per_node}" for rank in range(world))
    given = [name.strip() for name in names.split(",")]
    if "" in given or len(set(given)) != len(given):
        raise ConfigError(
            f"{names!r} is not a list of different names",
            where="--nodes",
            remedy="write for example --nodes a,b",
        )
    if len(given) > world:
        raise ConfigError(
            f"{len(given)} nodes are more than {world} ranks",
            where="--nodes",
            remedy=f"name {world} or fewer",
        )
    if per_node is None:  # as even as it goes, the first ones with one more
        share, more = divmod(world, len(given))
        return tuple(
            name for i, name in enumerate(given) for _ in range(share + (1 if i < more else 0))
        )
    if world > per_node * len(given):
        raise ConfigError(
            f"{format_plural(len(given), 'node')} of {format_plural(per_node, 'rank')} cannot "
            f"hold {world}",
            where="--ranks-per-node",
            remedy=f"use {-(-world // len(given))}, or name {-(-world // per_node)} nodes",
        )
    filled = -(-world // per_node)
    if filled < len(given):
        raise ConfigError(
            f"{format_plural(world, 'rank')}, {per_node} on a node, leave {given[filled]} "
            f"without one",
            where="--nodes",
            remedy=f"name {format_plural(filled, 'node')}, or leave out --ranks-per-node",
        )
    return tuple(given[rank // per_node] for rank in range(world))


def parse_loss(text: str, topology: Topology) -> frozenset[int]:
    """ "lost=3,5" or "lost=node:a" -> ranks. Raises ConfigError for anything else."""
    word, equals, what = text.partition("=")
    lost: set[int] = set()
    if word.strip() != "lost" or not equals or not what.strip():
        raise _unreadable(text)
    for item in (part.strip() for part in what.split(",")):
        kind, colon, name = item.partition(":")
        if colon and kind == "node":
            here = {rank for rank, node in enumerate(topology.nodes) if node == name}
            if not here:
                nodes = dict.fromkeys(topology.nodes)
                raise unknown_name(ConfigError, "node", name, nodes, f"--what-if {text}")
            lost |= here
        elif item.isascii() and item.isdigit():
            lost.add(int(item))
        else:
            raise _unreadable(text)
    return frozenset(lost)


def _unreadable(text: str) -> UserError:
    return ConfigError(
        "this is not a loss",
        where=f"--what-if {text}",
        remedy="write lost=3, lost=3,5 or lost=node:a",
    )


def _as_json(
    config: RunConfig, topology: Topology, lost: frozenset[int], loss: LossImpact | None
) -> dict[str, Any]:
    replicas = len(topology.replicas)
    ranks = []
    estimates, placed = estimates_as_json(config, topology), placed_by_rank(config, topology)
    contents = contents_by_rank(config, topology)
    counts = communicators_by_rank(config, topology)
    for each, estimate, places, groups in zip(contents, estimates, placed, counts, strict=True):
        row = asdict(each)
        row |= {"at": asdict(each.at), "held": asdict(each.held) | {"total": each.held.total}}
        row["places"] = asdict(places)
        row["activations"] = None
        if has_formula(config):
            kept = activations_of(config, topology, each.at, device_kind(config))
            row["activations"] = asdict(kept) | {
                "per_microbatch": kept.per_microbatch,
                "total": kept.total,
            }
        row["estimate"] = estimate
        row["communicators"] = {"groups": groups, "bytes": groups * BYTES_EACH}
        ranks.append(row)
    value: dict[str, Any] = {
        "topology": topology.to_json(),
        "layout": config.layout.model_dump(mode="json"),
        "stages": [stages_as_json(config, replica) for replica in topology.replicas],
        "ranks": ranks,
        "microbatches": [
            {"from_step": step, "number": number, "shares": deal(number, replicas)}
            for step, number in microbatches(config).items()
        ],
    }
    if loss is not None:
        value["what_if"] = asdict(loss) | {
            "lost": sorted(lost),
            "microbatches": [
                {"from_step": step, "shares": deal(number, len(loss.whole)) if loss.whole else []}
                for step, number in microbatches(config).items()
            ],
        }
    return value
