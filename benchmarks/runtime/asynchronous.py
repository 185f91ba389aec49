"""Loss of the asynchronous schedules next to 1F1B's, on the quickstart's data and equal tokens.

    python -m benchmarks.runtime.asynchronous [--steps 400] [--seeds 3] [--learning-rate 3e-4]

Each case is a run of `holdfast train` on two workers along pp, with the data of the quickstart. Its
model has untied embeddings, as pipemare asks. A row has the last validation loss, and how far it is
above that of 1f1b with the same seed. A late gradient wants a lower learning rate than 6e-3.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from holdfast.cli.main import main as holdfast
from holdfast.events import Evaluated
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore

SCHEDULES = ("1f1b", "pipedream", "pipedream-2bw", "pipemare")
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.yaml"


def final_loss(folder: Path, schedule: str, seed: int, steps: int, rate: float) -> float:
    """The validation loss at the end of a run; its folder is kept."""
    run = folder / f"{schedule}-{seed}"
    changes = {
        "folder": run,
        "data.folder": folder / "dataset",
        "seed": seed,
        "device": "cpu",
        "train.steps": steps,
        "train.optimizer.learning_rate": rate,
        "model.tied_embeddings": "false",
        "train.evaluate.every": steps,
        "layout.workers": 2,
        "layout.pp": 2,
        "layout.schedule": schedule,
        "checkpoint.every_steps": steps,
    }
    words = ["train", str(QUICKSTART), *(f"{key}={value}" for key, value in changes.items())]
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = holdfast(words)
    if code:
        raise SystemExit(f"holdfast {' '.join(words)} ended with {code}:\n{said.getvalue()}")
    events = [record.event for record in read_journal(FolderStore(run))]
    return [event for event in events if isinstance(event, Evaluated)][-1].loss


def main() -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--folder", type=Path, help="of the runs; none: they are not kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        folder = given.folder or Path(own)
        above: dict[str, list[float]] = {name: [] for name in SCHEDULES}
        print(f"{given.steps} steps\n{'seed':<6}" + "".join(f"{n:>24}" for n in SCHEDULES))
        for seed in range(1, given.seeds + 1):
            row = f"{seed:<6}"
            rate = given.learning_rate
            losses = [final_loss(folder, name, seed, given.steps, rate) for name in SCHEDULES]
            for name, loss in zip(SCHEDULES, losses, strict=True):
                above[name].append(loss / losses[0] - 1)
                row += f"{loss:>14.4f} {above[name][-1]:>+9.2%}"
            print(row, flush=True)
        print("mean  " + "".join(f"{statistics.mean(above[n]):>+24.2%}" for n in SCHEDULES))


if __name__ == "__main__":
    main()
