"""`holdfast layout`: how a model is spread, drawn before anything starts.

`show` stands in `layout_show`; here is `schedule`, the order of work of one pipeline.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli import layout_show
from holdfast.cli.dispatch import app as make_app
from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.core.schedule.check import check_schedule
from holdfast.core.schedule.csv import from_csv, to_csv
from holdfast.core.schedule.draw import draw_svg as picture
from holdfast.core.schedule.draw import draw_text as drawing
from holdfast.core.schedule.named import SCHEDULES, build_schedule
from holdfast.core.schedule.table import Schedule
from holdfast.core.schedule.timing import Durations, Timeline, time_schedule
from holdfast.errors import ConfigError, UserError
from holdfast.layout import Replica
from holdfast.show import layout_distance
from holdfast.show.output import print_json, say, write_text

MAX_DRAWN_ACTIONS = 200_000  # of a drawing: more cannot be told apart
TIME_BOUNDS = (1e-9, 1e9)  # least and most, apart from 0: sums and ratios stay far from overflow

app = make_app("Show how a model is spread over workers, before anything starts.")
app.command()(layout_show.show)
app.command()(layout_distance.distance)


@dataclass(frozen=True)
class ScheduleRequest:
    """A table to draw, and the share of every stage in the model's time (mean 1)."""

    schedule: Schedule
    weights: tuple[float, ...]


@app.command()
def schedule(
    run_file: Annotated[
        Path | None, typer.Argument(help="take stages and microbatches from this run file")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
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
        _refuse_beside("--from-csv", {**sizes, "--replica": replica or None})
        asked = _request_of_table(from_csv)
    elif run_file is not None:
        _refuse_beside("a run file", sizes)
        asked = _request_of_run_file(run_file, list(overrides or []), name, microbatches, replica)
    else:
        _refuse_beside("options without a run file", {"--replica": replica or None})
        asked = _request_by_name(name or "1f1b", stages, microbatches or 8, virtual)
    found = time_schedule(asked.schedule, _durations(asked, forward, backward, send))
    _show(asked.schedule, found, svg=svg, csv=csv, json=json)


def _show(
    table: Schedule, found: Timeline, *, svg: Path | None, csv: Path | None, json: bool
) -> None:
    """Print the drawing or its numbers, and write the files that were asked for."""
    if json:
        print_json(_numbers(table, found))
    else:
        print(drawing(table, found, _columns(table)), flush=True)
    if svg is not None:
        write_text(svg, picture(table, found))
    if csv is not None:
        write_text(csv, to_csv(table))


def _refuse_beside(what: str, given: dict[str, Any]) -> None:
    for other, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{other} has no effect with {what}",
                where="command line",
                remedy="leave one of the two out",
            )


def _request_by_name(
    name: str, stages: int | None, microbatches: int, asked: int | None
) -> ScheduleRequest:
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
    return ScheduleRequest(
        build_schedule(name, stages // virtual, microbatches, virtual), (1.0,) * stages
    )


def _request_of_table(path: Path) -> ScheduleRequest:
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
    return ScheduleRequest(table, (1.0,) * table.stages)


def _request_of_run_file(
    path: Path, overrides: list[str], name: str | None, count: int | None, which: int
) -> ScheduleRequest:
    """The pipeline of one replica, with the microbatches that the first step deals to it."""
    from holdfast.api.start import SCREEN
    from holdfast.config.loading.load import load_config
    from holdfast.config.sections.task import refuse_task
    from holdfast.core.sharding.reduction_tree import deal
    from holdfast.launch.start.look import plan_to_look, with_prepared_vocabulary
    from holdfast.launch.start.machine import checked_layouts
    from holdfast.plan.placing.balance import times_of_stages
    from holdfast.plan.step_microbatches import microbatches

    if name is not None:
        overrides = [*overrides, f"layout.schedule={name}"]
    loaded = load_config(path, overrides)
    refuse_task(loaded.config.task, "holdfast layout schedule", is_file=True)
    loaded, _ = plan_to_look(with_prepared_vocabulary(loaded, SCREEN), SCREEN)
    config, layouts = loaded.config, checked_layouts(loaded)
    if which >= len(layouts):
        raise ConfigError(
            f"there is no replica {which}", where="--replica", remedy=f"use 0 to {len(layouts) - 1}"
        )
    layout = layouts[which]
    share = len(deal(microbatches(config)[1], len(layouts))[which])
    virtual = config.layout.stages_a_worker if layout.pp > 1 else 1
    schedule = config.layout.schedule if layout.pp > 1 else "1f1b"
    asked = _request_by_name(schedule, layout.pp * virtual, count or share, virtual)
    times: tuple[float, ...] = (1.0,)
    if layout.stages:
        ranks = tuple(range(layout.replica_size))
        placed = Replica(0, ranks, layout.mesh_shape, layout.stages, 1, layout.is_folded)
        times = times_of_stages(config, placed)
    if config.model.vocab_size == 0:
        say("the dataset is not prepared: the head counts as nothing; add model.vocab_size=N")
    mean = sum(times) / len(times)
    return ScheduleRequest(asked.schedule, tuple(time / mean for time in times))


def _durations(
    asked: ScheduleRequest, forward: str | None, backward: str | None, send: float
) -> Durations:
    stages = asked.schedule.stages
    ahead = asked.weights if forward is None else _times("--forward", forward, stages)
    back = (
        tuple(2 * time for time in ahead)
        if backward is None
        else _times("--backward", backward, stages)
    )
    if not _is_time(send):
        raise ConfigError(
            f"{send} is no time that can be drawn", where="--send", remedy=f"use {_RANGE}"
        )
    return Durations(ahead, back, send=send)


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
