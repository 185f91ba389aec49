"""The quickstart, as a list of commands, and one thing that no command does: a run on four nodes is
disturbed while it trains (`disturbed.py`), and must end as the one that nobody disturbs.

    python examples/quickstart/run.py [--size small|standard]

The same command again goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from pathlib import Path

from disturbed import NODES, SETTINGS, Disturbed, Row, table

from holdfast.config.loading.load import load_config
from holdfast.core.data.lineage import split_effective
from holdfast.data.stream.dataset import Dataset
from holdfast.events import Evaluated, StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore

HERE = Path(__file__).parent
RUN_FILES = {"small": HERE / "run.yaml", "standard": HERE / "standard.yaml"}
SMALL_LIMIT = 2.3  # bits per byte of validation text at the end; standard: below the bigram's
PROMPT = "def read_lines(path):\n"
INTERRUPTED = 130  # exit code after Ctrl-C
LEAVE_SECONDS = 5.0  # until a command that Ctrl-C did not reach is told to leave


def show(*arguments: str | Path) -> list[str]:
    """`holdfast ARGUMENTS` as a person would type it; the arguments as words."""
    words = [str(argument) for argument in arguments]
    shown = [word if word.isprintable() and " " not in word else repr(word) for word in words]
    print(f"\n$ holdfast {' '.join(shown)}", flush=True)
    return words


def holdfast(*arguments: str | Path) -> None:
    """Run it to its end; where it fails, this ends too, with its exit code."""
    words = show(*arguments)
    with subprocess.Popen([sys.executable, "-m", "holdfast.cli.main", *words]) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            _let_leave(process)
            raise
    if code:
        sys.exit(code)


def _let_leave(process: subprocess.Popen[bytes]) -> None:
    """A terminal's Ctrl-C has reached the command too, which saves and leaves. SIGTERM says the
    same to one that it has not reached, and nothing to one that is leaving."""
    try:
        process.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Train, disturb, compare, report, sample.")
    parser.add_argument("--size", choices=RUN_FILES, default="small")
    size = parser.parse_args().size
    try:
        return quickstart(size)
    except KeyboardInterrupt as interrupt:
        where = f" {interrupt}" if str(interrupt) else ""
        print(f"\ninterrupted{where}; the same command goes on from there", file=sys.stderr)
        return INTERRUPTED


def quickstart(size: str) -> int:
    """All commands, one after the other; the exit code."""
    began = time.monotonic()
    run_file = RUN_FILES[size]
    config = load_config(run_file).config
    folder = Path(config.run_folder)
    alone = folder.with_name(f"{folder.name}-undisturbed")

    holdfast("data", "prepare", run_file)
    say(f"{len(NODES)} nodes, each an agent of its own with one worker, as on so many machines:")
    show("train", run_file, "cluster.node=NAME", *SETTINGS, "...")
    rows = disturb(run_file, folder, config.train.steps)
    say("The same run once more, on one node, and nobody disturbs it:")
    holdfast("train", run_file, f"folder={alone}")
    say("Every sample once, in spite of all that:")
    holdfast("data", "audit", folder)
    say("Every weight and every moment of the optimizer, byte by byte:")
    holdfast("checkpoint", "diff", folder, alone)
    holdfast("report", folder, "--sample", PROMPT)
    holdfast("generate", folder, PROMPT, "--temperature", "0.6")
    print(f"\nWhat was done to the run on {len(NODES)} nodes, and what it cost:\n\n{table(rows)}")
    same = compare(folder, alone, config.train.steps)
    baselines = Dataset.open(config.data.folder).baselines
    limit = baselines["bigram"] if size == "standard" and baselines else SMALL_LIMIT
    learned = verdict(folder, limit, time.monotonic() - began)
    missed = missing(rows, folder)
    if missed:
        print(missed)
    return 0 if same and learned and not missed else 1


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


def disturb(run_file: Path, folder: Path, steps: int) -> list[Row]:
    """The disturbed run, to its last step, and what was done to it."""
    desk = folder.with_name(f"{folder.name}-nodes")
    run = Disturbed(run_file, folder, steps, desk)
    where = "network namespaces, so that a partition is a real one"
    if run.why_not is not None:
        where = (
            f"processes alone: {run.why_not}. Instead of being cut off, a node is stopped "
            "(SIGSTOP), which the others cannot tell apart"
        )
    print(f"  (they run in {where})", flush=True)
    try:
        if not run.run():
            sys.exit(f"the run on several nodes did not finish; what they said: {run.said}")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"after step {run.story.step}") from None
    rows = run.outcome()
    if run.found_finished and (missed := missing(rows, folder)):
        sys.exit(f"\n{missed}")  # nothing that follows could make it good
    return rows


def missing(rows: list[Row], folder: Path) -> str:
    """The sentence about what was not done to the run; "" where all was."""
    names = ", ".join(f"{row.name} ({row.what})" for row in rows if not row.happened)
    if not names:
        return ""
    return (
        f"{folder}: this was not done to the run, so it shows nothing: {names}; start anew "
        f"with: rm -r {folder}, and the same command"
    )


def losses(folder: Path) -> dict[int, float]:
    """Of every step that counts."""
    effective, _ = split_effective(read_journal(FolderStore(folder)))
    return {r.event.step: r.event.loss for r in effective if isinstance(r.event, StepDone)}


def bits(folder: Path) -> float:
    """Per byte of validation text, at the end."""
    effective, _ = split_effective(read_journal(FolderStore(folder)))
    told = [r.event.bits_per_byte for r in effective if isinstance(r.event, Evaluated)]
    return told[-1] if told else math.nan  # which is as good as nothing, and equals nothing


def compare(folder: Path, alone: Path, last: int) -> bool:
    """Print both ends side by side; whether each has a loss of all steps up to the `last`, and they
    are the same, to the last bit."""
    disturbed, undisturbed = losses(folder), losses(alone)
    rows = [
        ("", "disturbed", "undisturbed"),
        (f"loss of step {last}", repr(disturbed.get(last)), repr(undisturbed.get(last))),
        ("bits per byte", repr(bits(folder)), repr(bits(alone))),
    ]
    print()
    for name, one, other in rows:
        print(f"  {name:<18}  {one:<20}  {other:<20}".rstrip())
    due = range(1, last + 1)
    for name, found in (("disturbed", disturbed), ("undisturbed", undisturbed)):
        if untold := [step for step in due if step not in found]:
            print(
                f"\n{len(untold)} of {last} steps have no loss in the journal of the {name} run, "
                f"the first is {untold[0]}."
            )
            return False
    differ = [step for step in due if disturbed[step] != undisturbed[step]]
    if differ or bits(folder) != bits(alone):
        where = f"first at step {differ[0]}" if differ else "in their validation at the end"
        print(f"\nThe two runs differ, {where}.")
        return False
    print(f"\nThe losses of all {last} steps are the same, to the last bit.")
    return True


def verdict(folder: Path, limit: float, seconds: float) -> bool:
    """Print how it ended; whether the model learned what it should."""
    found = bits(folder)
    print(
        f"{found:.2f} bits per byte of validation text (at most {limit:.2f} was asked for), "
        f"{seconds / 60:.1f} minutes; the report: {folder / 'report.html'}"
    )
    return found <= limit


if __name__ == "__main__":
    sys.exit(main())
