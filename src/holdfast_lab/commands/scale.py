"""`holdfast scale`: how a run scales from 8 to 16,384 devices, and where more stop to pay."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.errors import LayoutError
from holdfast.plan.explain.figures import words_of_layout
from holdfast.show.output import print_json, print_table, say, write_text
from holdfast_lab.scale.scale_curve import SIZES, Curve, Point, shown_knee

app = make_app("Show how a run scales with the number of devices. Starts nothing.")

USUAL = "1x8xH100-80"
_BAR = 20  # characters of a bar
_HEAD = (
    *("devices", "layout", "step s", "tokens/s", "efficiency", ""),
    *("exposed", "bubble", "with failures", "$/1e9 tokens", ""),
)

_LEGEND = (
    "efficiency: tokens/s of a device, of the most at any size. exposed: share of a step in which "
    "a device waits\nfor communication; bubble: for other stages. with failures: expected "
    "throughput, of that without.\nknee: the last size that pays"
)
_USED = (
    "used: the fastest layout leaves the other devices idle. They replace lost nodes, so failures "
    "cost it less.\nDollars are those of the used nodes"
)


@app.command()
def scale(
    run_file: Annotated[Path, typer.Argument(help="the run file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            help="a file or short form; its first pool says what a node is; none: plan.cluster of "
            f"the run file, or {USUAL}",
        ),
    ] = None,
    most: Annotated[int, typer.Option(min=8, help="largest number of devices")] = SIZES[-1],
    svg: Annotated[Path | None, typer.Option(help="write the curve as SVG")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Search the best layout on 8, 16, ... devices, and mark the knee.

    Degrees that the run file gives are kept, and the batch is the run's on every size. Efficiency
    is tokens/s of a device, of the most that one reaches at any size. Exposed is the share of a
    step in which a device waits for communication. With failures is the expected throughput, of
    that without. The knee is the last size up to which each doubling of devices makes throughput at
    least 1.5 times as large. It is marked for the best layouts, and for the layout of the smallest
    size with more replicas.

    \b
    Example:
      holdfast scale run.yaml
      holdfast scale run.yaml --cluster 1x8xA100-80 --most 1024 --svg scale.svg
    """
    from holdfast.cli.plan_request import load_for_plan
    from holdfast.plan.auto.objective import is_allowed
    from holdfast.plan.auto.search_run import limits_of
    from holdfast.plan.cost.evaluate import Problem
    from holdfast.plan.cost.run_workload import workload_of
    from holdfast.plan.hardware.cluster_file import read_cluster
    from holdfast.plan.hardware.devices import load_devices
    from holdfast.plan.objective.energy import pools_without_price
    from holdfast_lab.scale.scale_curve import kept_curve, scale_curve

    loaded, notes = load_for_plan(run_file, list(overrides or []))
    for note in notes:
        say(note)
    config, limits = loaded.config, limits_of(loaded, has_host=True)
    allows = partial(is_allowed, config)
    named = cluster or config.plan.cluster or USUAL
    machines = read_cluster(named)
    share = config.plan.memory_share
    problem = Problem(workload_of(config), machines, load_devices(), memory_share=share)
    sizes = [devices for devices in SIZES if devices <= most]
    curve = scale_curve(
        problem, limits, sizes, on_size=lambda n: say(f"searching {n:,} devices"), allows=allows
    )
    if not curve.points:
        raise LayoutError(
            f"no size has a layout: {list(curve.missing.values())[-1]}",
            where=str(run_file),
            remedy="use other machines with --cluster, or train.microbatch_size=1",
        )
    kept = kept_curve(problem, limits, curve, allows)
    if json:
        print_json(_as_json(curve, kept))
    else:
        print(f"{config.name}: batch {config.train.batch_size}, nodes of {named}")
        _print_curve(curve, kept, pools_without_price(machines))
        print(_LEGEND)
        if any(point.choice.devices < point.devices for point in curve.points):
            print(_USED)
        plan = shlex.join(["holdfast", "plan", str(run_file), *(overrides or [])])
        print(f"next: {plan} --cluster NODESxDEVICESxNAME")
    if svg is not None:
        from holdfast_lab.charts.scale_chart import scale_svg

        write_text(svg, scale_svg(curve, kept, f"{config.name} on nodes of {named}"))


def _print_curve(curve: Curve, kept: Curve, unpriced: tuple[str, ...]) -> None:
    knees = {knee.devices for each in (curve, kept) if (knee := shown_knee(each))}
    print_table([_row(curve, point, knees) for point in curve.points], _HEAD)
    for devices, why in curve.missing.items():
        print(f"{devices:,} devices have no layout: {why}")
    print(_knee_words(curve, kept))
    if unpriced:
        print(f"no price is known of {', '.join(unpriced)}: dollars are left out")


def _row(curve: Curve, point: Point, knees: set[int]) -> list[str]:
    from holdfast.report.formatting import format_si
    from holdfast.report.live.braille import split_bar

    efficiency = curve.efficiency(point)
    used, marks = point.choice.devices, list[str]()
    if used < point.devices:
        marks.append(f"{used:,} used")
    if shown_knee(curve) == point:
        marks.append("<- knee")
    elif point.devices in knees:
        marks.append("<- knee with degrees kept")
    return [
        f"{point.devices:,}",
        words_of_layout(point.choice),
        f"{point.step_s:.3f}",
        format_si(point.tokens_per_s),
        f"{efficiency:.0%}",
        "".join(split_bar(efficiency, _BAR)),
        f"{point.exposed:.1%}",
        f"{point.bubble:.1%}",
        f"{point.available:.1%}",
        "?" if point.usd is None else f"{point.usd:,.2f}",
        ", ".join(marks),
    ]


def _knee_words(curve: Curve, kept: Curve) -> str:
    knee, before, first = curve.knee, kept.knee, curve.points[0]
    if knee is None or before is None:
        return "no knee"
    at = f"knee: {knee.devices:,} devices, {words_of_layout(knee.choice)}"
    if knee.devices == curve.points[-1].devices:
        at = f"no knee up to {knee.devices:,} devices"
    if before.devices >= knee.devices:
        return f"{at}; {words_of_layout(first.choice)} with more replicas gets as far"
    words = words_of_layout(first.choice)
    return f"{at}; {words} with more replicas stops to pay after {before.devices:,}"


def _as_json(curve: Curve, kept: Curve) -> dict[str, Any]:
    knee, before = curve.knee, kept.knee
    return {
        "points": [
            {**_plain(point), "efficiency": curve.efficiency(point)} for point in curve.points
        ],
        "kept": [{**_plain(point), "efficiency": kept.efficiency(point)} for point in kept.points],
        "missing": {str(devices): why for devices, why in curve.missing.items()},
        "knee": knee.devices if knee else None,
        "knee_with_degrees_kept": before.devices if before else None,
    }


def _plain(point: Point) -> dict[str, Any]:
    value = asdict(point)
    value["choice"]["host"] = sorted(value["choice"]["host"])
    return value
