"""`holdfast explain`: what went wrong in a run, and what shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, RunArgument
from holdfast.doctor.state import is_at_work
from holdfast.events import Record
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.runs import Run, open_run
from holdfast.report.causes.explain import explain as find_causes
from holdfast.report.causes.finding import MODES, Evidence, Finding, LogReader
from holdfast.report.history.progress import RunProgress
from holdfast.report.ledger.ordering import order_records
from holdfast.show.output import print_json, say
from holdfast.wire.journal import read_journal
from holdfast.wire.process_log import message_of

MAX_LOG_BYTES = 8192
MAX_LOG_LINES = 3

app = make_app("Say what went wrong in a run, and what shows it.")


@app.command()
def explain(run: RunArgument, json: Json = False) -> None:
    """Say what went wrong in a run: cause, rank, node, and the records that show it.

    It reads the journal, and the logs of lost workers in the run folder. It can be called at any
    time, also while the run trains. If the evidence is short, it says so, and what would tell.

    \b
    Example:
      holdfast explain runs/my-run
      holdfast explain runs/my-run --json
    """
    found = open_run(run)
    records = read_journal(found.store)
    findings = find_causes(records, log_reader(found.folder))
    is_lost = _is_lost(found, records)
    if json:
        print_json({"findings": [f.to_json() for f in findings], "is_lost": is_lost})
        return
    if not (findings or is_lost):
        say("nothing went wrong: no worker was lost, and no step, checkpoint or pace was bad")
    for number, finding in enumerate(findings, 1):
        print("\n".join(_lines(number, finding)))
    if is_lost:
        print(
            "the run is not over, and no agent of it is at work: all were killed, or their "
            "machines are lost\n   runbook: docs/runbooks/run-lost.md"
        )


def _is_lost(run: Run, records: Sequence[Record]) -> bool:
    """Return whether the journal has no end of the run, and nothing is at work."""
    progress = RunProgress(run.config.train.steps)
    for record in order_records(records):
        progress.observe(record)
    return not progress.is_over and not is_at_work(
        run.folder, HolderWatch(run.folder, lambda line: None)
    )


def log_reader(folder: Path) -> LogReader:
    """Return the reader of the logs of a run folder's workers."""

    def read(generation: int, rank: int) -> Sequence[Evidence]:
        path = folder / "logs" / f"{generation:010d}" / f"rank{rank}.log"
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ()
        lines = [message_of(line) for line in text.splitlines() if line.strip()]
        place = str(path.relative_to(folder))
        return [Evidence(place, line) for line in lines[-MAX_LOG_LINES:]]

    return read


def _lines(number: int, finding: Finding) -> list[str]:
    lines = [f"{number}. step {finding.step:,}: {finding.sentence}"]
    lines += [f"   {item.place}: {item.text}" for item in finding.evidence]
    return [*lines, f"   runbook: docs/runbooks/{MODES[finding.mode].runbook}.md"]
