"""`holdfast report`: one page about a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import RunArgument, run_path
from holdfast.core.devices import is_accelerator
from holdfast.errors import ConfigError, DataError, RunFolderError
from holdfast.events import Record
from holdfast.launch.run.holder import HolderWatch, is_holder_gone
from holdfast.launch.run.runs import Run, open_run, read_environment
from holdfast.show.output import print_json, say

app = make_app("Write one HTML page about a run.")


Compared = Annotated[
    Path | None,
    typer.Option(parser=run_path, metavar="<run>", help="print this run next to another one"),
]


@app.command()
def report(
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Option(help="where to write the page; none: report.html in the folder")
    ] = None,
    sample: Annotated[
        list[str] | None, typer.Option(help="text for the model to continue; may be repeated")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="write what each worker did when in layout.trace_step, for Perfetto"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="write the page again every 10 s until the run ends")
    ] = False,
    compare: Compared = None,
    json: Annotated[bool, typer.Option("--json", help="print the numbers as JSON instead")] = False,
) -> None:
    """Write loss, throughput, use of time and every incident of a run as one HTML page.

    It can be made at any time, also during the run, and loads nothing from anywhere. With --sample,
    the page also shows how the newest intact checkpoint continues a prompt.

    While the run trains, a browser loads the page again every 10 s. With --follow, this command
    writes it as often, and the last time when the run has ended. Ctrl-C ends it; the run continues.

    With --trace, a file for ui.perfetto.dev is written instead, of the step that the run file names
    in layout.trace_step. It shows forward and backward passes, waits, and gradients being summed.

    With --compare, two runs are printed side by side. Each may be real, or the folder of
    `holdfast simulate --out`. The first recovery that they decided differently is named.

    \b
    Example:
      holdfast report runs/quickstart
      holdfast report runs/quickstart --follow
      holdfast report runs/quickstart --compare simulated
      holdfast report run.yaml --output page.html --sample "import os" --sample "def f("
    """
    if trace is not None:
        given = {"--json": json, "--output": output is not None, "--follow": follow}
        _refuse_beside("--trace", {**given, "--sample": sample})
    if follow:
        _refuse_beside("--follow", {"--json": json, "--sample": sample})
    if compare is not None:
        given = {"--output": output is not None, "--follow": follow, "--trace": trace is not None}
        _refuse_beside("--compare", {**given, "--sample": sample})
        _compare(run, compare, json=json)
        return
    found = open_run(run)
    path = output or found.folder / "report.html"
    if trace is not None:
        write_trace(found, trace)
    elif follow:
        watch = HolderWatch(found.folder)
        follow_run(found, path, lambda: is_holder_gone(watch))
    else:
        _report_once(found, None if json else path, samples_of(found, sample) if sample else [])


def _compare(run: Path, other: Path, *, json: bool) -> None:
    from holdfast.cli.report_compare import compare

    compare(open_run(run), other, json=json)


def _report_once(found: Run, path: Path | None, samples: list[dict[str, Any]]) -> None:
    """Write the page of a run as it is now; without a path, print its numbers as JSON."""
    from holdfast.cli.report_compare import history_of
    from holdfast.report.history.summary import summary
    from holdfast.report.page import page

    story = history_of(found)
    counts, device = baselines_of(found), device_of(found)
    if path is None:
        numbers = summary(story, found.resolved, baselines=counts, device=device)
        print_json(numbers | {"samples": samples})
        return
    page.write_page(
        story,
        found.resolved,
        path,
        baselines=counts,
        samples=[one["prompt"] + one["text"] for one in samples],
        device=device,
        written_at=time.time(),
    )
    more = "; the run trains: --follow writes it again" if story.state == "running" else ""
    say(f"wrote {path}{more}")
    if story.plan is not None:
        say(story.plan.sentence())


def follow_run(
    run: Run,
    path: Path,
    is_trainer_gone: Callable[[], bool],
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Write the page of a run again and again until the run has ended.

    is_trainer_gone: of a run whose end is in no record. wait: sleeps so many seconds; a
    KeyboardInterrupt in it ends this."""
    from holdfast.report.history.history import build_history
    from holdfast.report.page.page import REFRESH_S, write_page
    from holdfast.wire.journal import JournalTail

    tail, records = JournalTail(run.store), list[Record]()
    baselines, device = baselines_of(run), device_of(run)
    say(f"writing {path} every {REFRESH_S} s until the run ends; Ctrl-C ends this")
    while True:
        records += tail.read_new()
        story = build_history(records)
        is_over = story.state not in ("empty", "running")
        if not is_over and is_trainer_gone():
            story, is_over = (story.as_interrupted() if story.sessions else story), True
        write_page(
            story,
            run.resolved,
            path,
            baselines=baselines,
            device=device,
            written_at=time.time(),
        )
        if is_over:
            say(f"wrote {path}: the run has ended")
            return
        try:
            wait(REFRESH_S)
        except KeyboardInterrupt:
            return


def _refuse_beside(other: str, given: dict[str, Any]) -> None:
    for option, value in given.items():
        if value:
            raise ConfigError(
                f"{option} has no effect with {other}",
                where="command line",
                remedy="leave one of the two out",
            )


def write_trace(run: Run, path: Path) -> None:
    """Write the newest traced step of all ranks atomically.

    Raises DataError when the run has none, RunFolderError when the path cannot be written.
    """
    from json import dumps

    from holdfast.events import StepTraced
    from holdfast.parallel.comm.trace import TraceSpan, chrome_trace
    from holdfast.wire.journal import read_journal

    traced = [r for r in read_journal(run.store) if isinstance(r.event, StepTraced)]
    if not traced:
        raise DataError(
            "no step of this run was traced",
            where=str(run.folder),
            remedy="train on with layout.trace_step=N for a step N that is still to come",
        )
    newest = max((record.generation, record.event.step) for record in traced)
    spans = {
        record.event.rank: [TraceSpan(*values) for values in record.event.spans]
        for record in traced
        if isinstance(record.event, StepTraced) and (record.generation, record.event.step) == newest
    }
    _write(path, dumps(chrome_trace(spans)))
    say(f"wrote {path}: step {newest[1]}, {len(spans)} workers; open it in ui.perfetto.dev")


def _write(path: Path, text: str) -> None:
    if path.is_dir():
        raise RunFolderError(
            "the trace cannot be written: this is a folder",
            where=str(path),
            remedy="name a file in it with --trace",
        )
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise RunFolderError(
            f"the trace cannot be written ({error.strerror})",
            where=str(path),
            remedy="name another place with --trace",
        ) from error
    finally:
        part.unlink(missing_ok=True)


def samples_of(run: Run, prompts: list[str]) -> list[dict[str, Any]]:
    """Return the newest intact checkpoint's continuation of each prompt. Raises UserError."""
    from holdfast.export.weights import Sampling, continuations, with_checkpoint

    checkpoint, texts = with_checkpoint(
        run, None, lambda chosen: continuations(run, chosen, prompts, Sampling()), say
    )
    return [
        {"step": checkpoint.step, "prompt": prompt, "text": text}
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def baselines_of(run: Run) -> dict[str, float] | None:
    """Return bits per byte of unigram and bigram counts on the very tokens of the run's validation.
    None, with a message, if the run's dataset no longer exists."""
    from holdfast.data.stream.batch import Batches
    from holdfast.data.stream.dataset_location import open_dataset

    config = run.config
    if config.task.has_own_data or run.is_simulated:
        return None  # its data is no text, or it had none
    try:
        dataset = open_dataset(run.dataset_location, config.data)
        if not dataset.is_version(run.dataset_version):
            say(f"no counts beside the curve: {dataset.place} holds another dataset now")
            return None
        batches = Batches(dataset, config.data, config.train, config.seed)
    except DataError as error:
        say(f"no counts beside the curve: {error}")
        return None
    return batches.validation_baselines(config.train.evaluate.samples)


def device_of(run: Run) -> str | None:
    """Name of the accelerator that the run used, None on a CPU."""
    if not is_accelerator(run.config.device):
        return None
    devices: list[dict[str, Any]] = (
        read_environment(run.folder).get("hardware", {}).get("accelerators", [])
    )
    return devices[0]["name"] if devices else None
