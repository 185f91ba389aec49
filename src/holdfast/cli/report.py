"""`holdfast report`: one page about a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import RunArgument, refuse_beside, run_path
from holdfast.core.devices import is_accelerator
from holdfast.core.json_parsing import parse_json
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.errors import DataError, HoldfastError
from holdfast.events import Record, StepTraced
from holdfast.export.texts import Sampling, continuations
from holdfast.export.weights import with_checkpoint
from holdfast.launch.run.holder import HolderWatch, is_holder_gone
from holdfast.launch.run.runs import Run, open_run, read_environment
from holdfast.report.formatting import format_plural
from holdfast.report.history.comparison import (
    Decision,
    RunComparison,
    RunFacts,
    compare_runs,
    facts_of,
)
from holdfast.report.history.history import History, build_history, read_history
from holdfast.report.history.summary import summary
from holdfast.report.ledger.incidents import describe_rung
from holdfast.report.ledger.timeledger import CLASSES
from holdfast.report.page.page import REFRESH_S, render_page, write_result
from holdfast.show.output import print_json, print_table, say
from holdfast.wire.journal import JournalTail, read_journal
from holdfast.wire.store.run_store import SIMULATED_FILE

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
        refuse_beside("--trace", {**given, "--sample": sample})
    if follow:
        refuse_beside("--follow", {"--json": json, "--sample": sample})
    if compare is not None:
        given = {"--output": output is not None, "--follow": follow, "--trace": trace is not None}
        refuse_beside("--compare", {**given, "--sample": sample})
        _compare(open_run(run), compare, json=json)
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


def _report_once(found: Run, path: Path | None, samples: list[dict[str, Any]]) -> None:
    """Write the page of a run as it is now; without a path, print its numbers as JSON."""
    story = history_of(found)
    counts, device = baselines_of(found), device_of(found)
    if path is None:
        numbers = summary(story, found.resolved, baselines=counts, device=device)
        print_json(numbers | {"samples": samples})
        return
    page = render_page(
        story,
        found.resolved,
        baselines=counts,
        samples=[one["prompt"] + one["text"] for one in samples],
        device=device,
        written_at=time.time(),
    )
    write_result(path, page)
    more = "; the run trains: --follow writes it again" if story.state == "running" else ""
    say(f"wrote {path}{more}")
    for metric in story.metrics:
        if metric.advice:
            say(metric.advice)
    if lost := len(story.roles_lost):
        what = format_plural(lost, "exit"), format_plural(story.lost_tokens, "token")
        say(f"actors and scorers: {what[0]}, which lost {what[1]} of completions")
    for exchange in story.exchanges:
        say(exchange.sentence())
    if story.plan is not None:
        say(story.plan.sentence())
    for morph in story.morphs:
        say(morph.sentence())
    moves, false = story.predictions.values()
    if moves or false:
        what = format_plural(moves, "planned move"), format_plural(false, "false alarm")
        say(f"predictions: {', '.join(what)}")


def follow_run(
    run: Run,
    path: Path,
    is_trainer_gone: Callable[[], bool],
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Write the page of a run again and again until the run has ended.

    is_trainer_gone: of a run whose end is in no record. wait: sleeps so many seconds; a
    KeyboardInterrupt in it ends this."""
    tail, records = JournalTail(run.store), list[Record]()
    baselines, device = baselines_of(run), device_of(run)
    say(f"writing {path} every {REFRESH_S} s until the run ends; Ctrl-C ends this")
    while True:
        records += tail.read_new()
        story = build_history(records)
        is_over = story.state not in ("empty", "running")
        if not is_over and is_trainer_gone():
            story, is_over = (story.as_interrupted() if story.sessions else story), True
        page = render_page(
            story, run.resolved, baselines=baselines, device=device, written_at=time.time()
        )
        write_result(path, page)
        if is_over:
            say(f"wrote {path}: the run has ended")
            return
        try:
            wait(REFRESH_S)
        except KeyboardInterrupt:
            return


def write_trace(run: Run, path: Path) -> None:
    """Write the newest traced step of all ranks atomically.

    Raises DataError when the run has none, RunFolderError when the path cannot be written.
    """
    from json import dumps

    from holdfast.core.spans import TraceSpan, chrome_trace

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
    write_result(path, dumps(chrome_trace(spans)), "trace", "--trace")
    say(f"wrote {path}: step {newest[1]}, {len(spans)} workers; open it in ui.perfetto.dev")


def samples_of(run: Run, prompts: list[str]) -> list[dict[str, Any]]:
    """Return the newest intact checkpoint's continuation of each prompt. Raises UserError."""
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
    config = run.config
    if config.has_own_data or run.is_simulated:
        return None  # its data is no text, or it had none
    try:
        dataset = open_dataset(run.dataset_location, config.data)
        if not dataset.is_version(run.dataset_version):
            say(f"no counts beside the curve: {dataset.place} holds another dataset now")
            return None
        batches = Batches(dataset, config.data, config.step_train, config.seed)
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


Form = Callable[[float], str]

_TIERS = {0: "own memory", 1: "other nodes", 2: "the disk", 3: "the bucket"}


def _compare(run: Run, other: Path, *, json: bool) -> None:
    """Print the comparison of two runs. Raises UserError."""
    theirs = open_run(other)
    a, b = history_of(run), history_of(theirs)
    found = compare_runs(_facts(run, a), _facts(theirs, b), a, b)
    if json:
        print_json(found.to_json())
    else:
        for letter, facts in (("A", found.one), ("B", found.other)):
            kind = "simulated" if facts.is_simulated else "real"
            print(f"{letter}: {facts.place}: {facts.run}, {kind}, {facts.state}")
        print()
        print_table(_rows(found), ("", "A", "B", "B - A", "B/A - 1"))
        print()
        print(_words_of_decisions(found))
        for tier in found.tiers:
            both = (facts.intervals_s.get(tier) for facts in (found.one, found.other))
            words = " and ".join("no save" if s is None else f"{s:,.3g} s" for s in both)
            print(f"the last interval between saves into {_TIERS.get(tier, tier)} differs: {words}")


def history_of(run: Run) -> History:
    """The history of a run. It was interrupted if no process holds it any more."""
    history = read_history(run.store)
    if history.state == "running" and is_holder_gone(HolderWatch(run.folder)):
        return history.as_interrupted()
    return history


def _facts(run: Run, history: History) -> RunFacts:
    return facts_of(history, run.place, _totals(run) if run.is_simulated else None)


def _totals(run: Run) -> dict[str, Any]:
    """What the engine knows and no journal has; empty if the file is missing or damaged."""
    try:
        found = parse_json(run.store.get(SIMULATED_FILE))
    except (HoldfastError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _rows(found: RunComparison) -> list[tuple[str, ...]]:
    one, other = found.one.numbers(), found.other.numbers()
    names: list[tuple[str, str, Form]] = [
        ("wall time s", "wall_s", _number),
        ("steps kept", "steps", _whole),
        ("tokens kept", "tokens", _whole),
        ("tokens kept a second", "tokens_per_s", _number),
        ("tokens done again", "tokens_again", _whole),
        ("goodput", "goodput", _percent),
        ("interruptions", "interruptions", _whole),
    ]
    for rung in sorted({*found.one.by_rung, *found.other.by_rung}):
        label = describe_rung(rung) if rung >= 0 else "no recovery"
        names.append((f"  {label}", f"by_rung.{rung}", _whole))
    names += [("planned changes", "changes", _whole), ("steps lost", "lost_steps", _whole)]
    for label, name in _SPREADS:
        names += [(f"{label}, {key}", f"{name}.{key}", _number) for key in _QUANTILES]
    names += [("node-hours with work", "node_hours", _number)]
    names += [("$", "usd", _number), ("kWh", "kwh", _number), ("kg CO2", "co2_kg", _number)]
    names += [(f"{label.replace('_', ' ')} s", f"seconds.{label}", _number) for label in CLASSES]
    return [
        _row(label, one.get(name), other.get(name), form, name)
        for label, name, form in names
        if one.get(name) or other.get(name) or name in _ALWAYS
    ]


_SPREADS = (
    ("RPO steps", "rpo_steps"),
    ("RPO s", "rpo_s"),
    ("RTO s", "rto_s"),
    ("stall s", "stall_s"),
)
_QUANTILES = ("p50", "p95", "worst")
_ALWAYS = ("steps", "tokens", "goodput", "interruptions", "lost_steps")


def _row(
    label: str, a: float | None, b: float | None, form: Form, name: str
) -> tuple[str, str, str, str, str]:
    if name.startswith(("by_rung.", "seconds.")):
        a, b = a or 0.0, b or 0.0
    if a is None or b is None:
        one, other = (form(value) if value is not None else "-" for value in (a, b))
        return label, one, other, "", ""
    share = f"{100 * (b / a - 1):+.1f} %" if a else ""
    sign = "+" if b > a else "" if b == a else "-"
    return label, form(a), form(b), sign + form(abs(b - a)), share


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _words_of_decisions(found: RunComparison) -> str:
    first = found.first
    if first is None:
        number = format_plural(found.decisions[0], "decision")
        return f"all {number} agree: recovery, nodes, steps lost"
    agree = f"{format_plural(first.index - 1, 'decision')} agree; " if first.index > 1 else ""
    return (
        f"{agree}decision {first.index} is the first that differs:\n"
        f"  A: {_decision_words(first.one)}\n  B: {_decision_words(first.other)}"
    )


def _decision_words(decision: Decision | None) -> str:
    if decision is None:
        return "none, the run has no more"
    how = describe_rung(decision.rung) if decision.rung >= 0 else "no recovery"
    return (
        f"at {decision.elapsed:,.1f} s, membership {decision.generation} ({decision.reason}): "
        f"{how}, {format_plural(decision.nodes, 'node')}, after step {decision.step:,}, "
        f"{format_plural(decision.lost_steps, 'step')} lost"
    )
