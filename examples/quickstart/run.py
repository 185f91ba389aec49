"""The quickstart, as a list of commands, and one thing that no command does: a run on four nodes is
disturbed while it trains (`disturbed.py`), and must end as the one that nobody disturbs.

    python examples/quickstart/run.py [--size small|standard]

The same command again goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from disturbed import NODES, SETTINGS, Disturbed, Row, table

from holdfast.config.load import load
from holdfast.data.dataset import Dataset
from holdfast.events import Evaluated, StepDone
from holdfast.spec.lineage import split
from holdfast.wire.journal import read
from holdfast.wire.runstore import FolderStore

HERE = Path(__file__).parent
RUN_FILES = {"small": HERE / "run.yaml", "standard": HERE / "standard.yaml"}
SMALL_LIMIT = 2.3  # bits per byte of validation text at the end; standard: below the bigram's
PROMPT = "def read_lines(path):\n"


def show(*arguments: str | Path) -> list[str]:
    """`holdfast ARGUMENTS` as a person would type it; the arguments as words."""
    words = [str(argument) for argument in arguments]
    shown = [word if word.isprintable() and " " not in word else repr(word) for word in words]
    print(f"\n$ holdfast {' '.join(shown)}", flush=True)
    return words


def holdfast(*arguments: str | Path) -> None:
    """Run it to its end; where it fails, this ends too, with its exit code."""
    words = show(*arguments)
    code = subprocess.call([sys.executable, "-m", "holdfast.cli.main", *words])
    if code:
        sys.exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train, disturb, compare, report, sample.")
    parser.add_argument("--size", choices=RUN_FILES, default="small")
    size = parser.parse_args().size
    began = time.monotonic()
    run_file = RUN_FILES[size]
    config = load(run_file).config
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
    same = compare(folder, alone)
    baselines = Dataset.open(config.data.folder).baselines
    limit = baselines["bigram"] if size == "standard" and baselines else SMALL_LIMIT
    learned = verdict(folder, limit, time.monotonic() - began)
    missed = [row.what for row in rows if not row.happened]
    if missed:
        print(f"did not happen: {', '.join(missed)}; make room for another try with: "
              f"rm -r {folder}*, and start again")  # fmt: skip
    return 0 if same and learned and not missed else 1


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


def disturb(run_file: Path, folder: Path, steps: int) -> list[Row]:
    """The disturbed run, to its last step, and what was done to it."""
    desk = folder.with_name(f"{folder.name}-nodes")
    run = Disturbed(run_file, folder, steps, desk)
    where = "network namespaces, so that a partition is a real one"
    if run.why_not is not None:
        where = (f"processes alone: {run.why_not}. Instead of being cut off, a node is stopped "
                 "(SIGSTOP), which the others cannot tell apart")  # fmt: skip
    print(f"  (they run in {where})", flush=True)
    try:
        if not run.run():
            sys.exit(f"the run on several nodes did not finish; what they said: {run.said}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted after step {run.story.step}; the same command goes on from there")
    return run.rows


def losses(folder: Path) -> dict[int, float]:
    """Of every step that counts."""
    effective, _ = split(read(FolderStore(folder)))
    return {r.event.step: r.event.loss for r in effective if isinstance(r.event, StepDone)}


def bits(folder: Path) -> float:
    """Per byte of validation text, at the end."""
    effective, _ = split(read(FolderStore(folder)))
    return [r.event.bits_per_byte for r in effective if isinstance(r.event, Evaluated)][-1]


def compare(folder: Path, alone: Path) -> bool:
    """Print both ends side by side; whether the losses are the same, to the last bit."""
    disturbed, undisturbed = losses(folder), losses(alone)
    last = max(undisturbed)
    differ = [step for step in disturbed if disturbed[step] != undisturbed.get(step)]
    rows = [
        ("", "disturbed", "undisturbed"),
        (f"loss of step {last}", repr(disturbed.get(last)), repr(undisturbed[last])),
        ("bits per byte", repr(bits(folder)), repr(bits(alone))),
    ]
    print()
    for name, one, other in rows:
        print(f"  {name:<18}  {one:<20}  {other:<20}".rstrip())
    if differ or last not in disturbed or bits(folder) != bits(alone):
        print(f"\nThe two runs differ, first at step {min(differ, default=last)}.")
        return False
    untold = last - len(disturbed)
    more = f" (who did {untold} more did not live to tell)" if untold else ""
    print(f"\nThe losses of {len(disturbed)} of {last} steps are the same, to the last bit{more}.")
    return True


def verdict(folder: Path, limit: float, seconds: float) -> bool:
    """Print how it ended; whether the model learned what it should."""
    found = bits(folder)
    print(f"{found:.2f} bits per byte of validation text (at most {limit:.2f} was asked for), "
          f"{seconds / 60:.1f} minutes; the report: {folder / 'report.html'}")  # fmt: skip
    return found <= limit


if __name__ == "__main__":
    sys.exit(main())
