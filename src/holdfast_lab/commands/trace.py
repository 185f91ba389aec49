"""`holdfast trace`: traces of machines, failures, prices, carbon and links, in one form."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from holdfast.api.progress import LongWork
from holdfast.cli.dispatch import app as make_app
from holdfast.errors import DataError
from holdfast.show.output import check_target, print_json, say
from holdfast_lab.commands.trace_show import (
    lines_of,
    parameters_of,
    print_fits,
    print_lines,
    print_stream,
    remarks_on,
    stream_as_json,
    svg_of,
)
from holdfast_lab.commands.trace_timeline import timeline
from holdfast_lab.traces.events import EventStream
from holdfast_lab.traces.generators import fit_trace, make_trace
from holdfast_lab.traces.node_changes import Burst, ReadOptions, Victims
from holdfast_lab.traces.reading import merge_streams, read_stream
from holdfast_lab.traces.rows import MOST_NODES
from holdfast_lab.traces.scenario import GapRule, with_notices, without_gaps
from holdfast_lab.traces.stream_file import format_stream

app = make_app("Read, show and make traces of machines that come and go; timelines of runs.")
app.command()(timeline)

Files = Annotated[list[Path], typer.Argument(help="files of any known kind; of several, one trace")]
Seed = Annotated[int, typer.Option(help="of what a file leaves open: which nodes of a count go")]
Rule = Annotated[
    Victims, typer.Option("--victims", help="which nodes of a count go; lifo: the youngest first")
]
Bursts = Annotated[
    Burst, typer.Option("--burst", help="how nodes that go together lie in the order of ranks")
]
Gaps = Annotated[
    GapRule,
    typer.Option(
        "--gaps",
        help="of gaps in the file: hold the state before them, skip their time, or cut out the "
        "longest part between two",
    ),
]
Tick = Annotated[
    float | None,
    typer.Option("--tick", min=0, help="seconds of a tick, for files of ticks; default: theirs"),
]
Zones = Annotated[
    list[str] | None,
    typer.Option(
        "--zone", help="a name for the zone of each file, or the choice of one; repeatable"
    ),
]
Gpu = Annotated[
    str, typer.Option("--gpu", help="a name for the type of device, or the choice of one")
]
Nodes = Annotated[
    int | None,
    typer.Option(min=1, max=MOST_NODES, help="nodes to draw from a table of lives or rates"),
]
Days = Annotated[
    float | None,
    typer.Option(min=0.001, max=36500, help="days to draw from a table of lives or rates"),
]
System = Annotated[
    str | None,
    typer.Option(help="the system in a table of outages; default: the one with most rows"),
]
Carbon = Annotated[
    Literal["average", "marginal"] | None,
    typer.Option(help="what an intensity is, if the file does not say it"),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command()
def convert(
    files: Files,
    to: Annotated[Path, typer.Option("--to", help="the file to write")],
    victims: Rule = "random",
    burst: Bursts = "any",
    seed: Seed = 0,
    notice: Annotated[
        float, typer.Option(min=0, help="seconds of warning before each departure")
    ] = 0.0,
    gaps: Gaps = "hold",
    tick: Tick = None,
    zone: Zones = None,
    gpu: Gpu = "",
    nodes: Nodes = None,
    days: Days = None,
    system: System = None,
    carbon: Carbon = None,
    json: Json = False,
) -> None:
    """Write files of any known kind as one stream of events.

    Holdfast finds the kind by the form of the file. It reports disorder, duplicates and gaps, and
    refuses a row that cannot be, with its line. docs/studies/traces.md has the kinds and the
    events.

    \b
    Example:
      holdfast trace convert p3-trace.csv --to p3.jsonl
      holdfast trace convert a.json b.json --zone us-east-1a --zone us-east-1c --to both.jsonl
    """
    check_target(to, "--to", files)
    options = ReadOptions(
        seed, victims, burst, tick, nodes, days, system, gpu=gpu, carbon=carbon or ""
    )
    stream = without_gaps(with_notices(read_files(files, options, zone), notice), gaps)
    write_stream(stream, to)
    if json:
        print_json(stream_as_json(stream))


@app.command()
def show(
    files: Files,
    victims: Rule = "random",
    seed: Seed = 0,
    gaps: Gaps = "hold",
    tick: Tick = None,
    zone: Zones = None,
    gpu: Gpu = "",
    nodes: Nodes = None,
    days: Days = None,
    system: System = None,
    json: Json = False,
) -> None:
    """Print nodes, bursts, lives, gaps and prices of a trace.

    \b
    Example:
      holdfast trace show p3.jsonl
    """
    options = ReadOptions(seed, victims, "any", tick, nodes, days, system, gpu=gpu)
    stream = without_gaps(read_files(files, options, zone), gaps)
    if json:
        with LongWork("adding up the trace"):
            found = stream_as_json(stream)
        print_json(found)
    else:
        print_stream(stream)


@app.command()
def fit(
    files: Files,
    victims: Rule = "random",
    seed: Seed = 0,
    tick: Tick = None,
    zone: Zones = None,
    gpu: Gpu = "",
    system: System = None,
    json: Json = False,
) -> None:
    """Estimate the parameters of a generator from a trace.

    \b
    Example:
      holdfast trace fit p3.jsonl
    """
    options = ReadOptions(seed, victims, "any", tick, system=system, gpu=gpu)
    stream = read_files(files, options, zone)
    with LongWork("fitting generators"):
        fits = fit_trace(stream)
    if json:
        print_json([asdict(each) for each in fits])
    else:
        print_fits(fits)


@app.command()
def make(
    kind: Annotated[
        Literal["spot", "gang", "lives", "failures", "prices", "carbon"],
        typer.Argument(help="the generator"),
    ],
    to: Annotated[Path, typer.Option("--to", help="the file to write")],
    seed: Seed = 0,
    days: Annotated[
        float | None,
        typer.Option(min=0.01, max=36500, help="length in days; default: the generator's"),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--set", help="a parameter of the generator: key=number; repeatable"),
    ] = None,
    notice: Annotated[
        float, typer.Option(min=0, help="seconds of warning before each departure")
    ] = 0.0,
    json: Json = False,
) -> None:
    """Write a synthetic trace. The same seed gives the same trace.

    docs/studies/traces.md has the parameters of each generator. `holdfast trace fit` estimates them
    from a trace, and prints the command that makes a similar one.

    \b
    Example:
      holdfast trace make spot --to spot.jsonl --days 2 --set nodes=16
    """
    check_target(to, "--to")
    with LongWork("making the trace"):
        stream = with_notices(make_trace(kind, seed, days, parameters_of(given or [])), notice)
    write_stream(stream, to)
    if json:
        print_json(stream_as_json(stream))


@app.command()
def plot(
    files: Files,
    victims: Rule = "random",
    seed: Seed = 0,
    tick: Tick = None,
    zone: Zones = None,
    gpu: Gpu = "",
    nodes: Nodes = None,
    days: Days = None,
    system: System = None,
    svg: Annotated[Path | None, typer.Option(help="write the first chart as SVG")] = None,
    json: Json = False,
) -> None:
    """Draw nodes, prices and intensities over time.

    \b
    Example:
      holdfast trace plot p3.jsonl --svg p3.svg
    """
    if svg is not None:
        check_target(svg, "--svg", files)

    options = ReadOptions(seed, victims, "any", tick, nodes, days, system, gpu=gpu)
    stream = read_files(files, options, zone)
    with LongWork("drawing"):
        lines = lines_of(stream)
        picture = svg_of(stream, lines) if svg is not None else ""
    if json:
        print_json([{"title": title, "points": points} for title, points in lines])
    else:
        print_lines(stream, lines, most=4)
    if svg is not None:
        write_text(picture, svg, "--svg")


# --- what the commands share --------------------------------------------------------------------
def read_files(files: list[Path], options: ReadOptions, zones: list[str] | None) -> EventStream:
    """One stream of all files."""
    return merge_streams(read_each(files, options, zones))


def read_each(
    files: list[Path], options: ReadOptions, zones: list[str] | None
) -> list[EventStream]:
    """A stream of each file."""
    given = zones or []
    if given and len(given) not in (1, len(files)):
        raise DataError(
            f"the numbers of files ({len(files)}) and of zones ({len(given)}) differ",
            where="command line, --zone",
            remedy="give one zone for each file, in their order",
        )
    streams = []
    for place, path in enumerate(files):
        zone = given[place % len(given)] if given else ""
        # A label only: the name of a file decides nothing about how it is read.
        label = path.stem if len(files) > 1 else ""
        named = replace(options, zone=zone, label=label)
        with LongWork(f"reading {path}"), _without_collection():
            streams.append(read_stream(read_bytes(path), str(path), named))
    return streams


@contextmanager
def _without_collection() -> Iterator[None]:
    """Rows make no cycles. To look for some among millions of them takes a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"the file cannot be read: {error.strerror}",
            where=str(path),
            remedy="give the path of a file that you can read",
        ) from None


def write_stream(stream: EventStream, to: Path) -> None:
    """Write the stream, and say what was found."""
    with LongWork(f"writing {to}"):
        write_text("".join(f"{line}\n" for line in format_stream(stream)), to, "--to")
    header = stream.header
    say(f"{to}: {len(stream.events):,} events of {header.rows:,} rows ({header.trace})")
    # What a reader should know about the source of a stream.
    for sentence in remarks_on(stream.header):
        say(sentence)


def write_text(content: str, to: Path, option: str) -> None:
    """Write a file, complete or not at all."""
    part = to.with_name(f".{to.name}.part")
    try:
        part.write_text(content, "utf-8")
        part.replace(to)
    except OSError as error:
        raise DataError(
            f"the file cannot be written: {error.strerror}",
            where=f"command line, {option} {to}",
            remedy="give a path in a folder that exists and that you can write to",
        ) from None
