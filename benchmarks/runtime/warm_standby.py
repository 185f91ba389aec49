"""What a warm standby saves: a worker of a compiled run is killed, with a standby and without.

    python -m benchmarks.runtime.warm_standby [--device cpu] [--steps 400]

One worker trains a small decoder with `train.compile: true`. It is killed by SIGKILL once the
standby has compiled its block. Each row says how many graphs the processes compiled, as torch logs
it. The gap is from the last step before the kill to the first one after it. The undisturbed
run comes first, so all other processes find compiled code in the compiler's folder on disk. That
folder is a new one. Every run ends with the same bits, or the command ends with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runtime.accelerator.journal import read_events
from benchmarks.runtime.accelerator.runs import Running, data, run_file
from benchmarks.runtime.accelerator.settings import Settings
from holdfast.events import GenerationStarted, StepDone
from holdfast_lab.chaos.compare import compare_runs

GRAPH = "TRACED GRAPH"
WARM = "warm: "
LIMIT_S = 400.0


@dataclass(frozen=True)
class Row:
    """graphs: compiled by the first worker, by all standbys, and by the process that took the place
    after that. gap_s: without a step. differs: from the undisturbed run."""

    name: str
    graphs: tuple[int, int, int]
    gap_s: float
    differs: str = ""

    def __str__(self) -> str:
        first, standby, after = self.graphs
        return f"{self.name:<24}{first:8d}{standby:9d}{after:8d}{self.gap_s:9.2f}  {self.differs}"


def measure(settings: Settings, steps: int) -> list[Row]:
    """Train undisturbed, with a worker killed, and the same with a standby."""
    path = run_file(settings, "warm", compile=True)
    rows = []
    for name, standbys in (("undisturbed", 0), ("killed, no standby", 0), ("killed, standby", 1)):
        folder = settings.scratch / name.replace(", ", "-").replace(" ", "-")
        run = Running(
            folder,
            *("train", path, f"folder={folder}", f"train.steps={steps}"),
            f"cluster.standbys={standbys}",
            "checkpoint.memory_every_steps=1",
            "train.microbatch_size=1",  # an evaluation then has the same shape
        )
        if name != "undisturbed":
            run.at_step(3, _killer(folder, standbys), LIMIT_S)
        run.finish(LIMIT_S)
        rows.append(_row(name, folder, settings.scratch / "undisturbed", steps))
    return rows


def _killer(folder: Path, standbys: int) -> Callable[[int], None]:
    """Return what kills a worker once `standbys` standbys are warm."""

    def kill(pid: int) -> None:
        end = time.monotonic() + LIMIT_S
        while sum(WARM in _text(log) for log in folder.glob("logs/standby*.log")) < standbys:
            if time.monotonic() > end:
                raise RuntimeError(f"no standby of {folder} has become warm")
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)

    return kill


def _row(name: str, folder: Path, undisturbed: Path, steps: int) -> Row:
    ranks = sorted(folder.glob("logs/*/rank0.log"))
    counts = [_text(log).count(GRAPH) for log in ranks]
    standby = sum(_text(log).count(GRAPH) for log in folder.glob("logs/standby*.log"))
    records = read_events(folder)
    begun = max(at for at, e in records if isinstance(e, GenerationStarted))
    done = [at for at, e in records if isinstance(e, StepDone)]
    before = max((at for at in done if at < begun), default=begun)
    gap = min(at for at in done if at > begun) - before
    found = compare_runs(folder, undisturbed, steps, 0.0)
    differs = found.curve or found.ledger or found.tensors
    return Row(name, (counts[0], standby, sum(counts[1:])), gap, differs)


def _text(log: Path) -> str:
    return log.read_text(errors="replace")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="holdfast-warm-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"
        os.environ["TORCH_LOGS"] = "graph_code"
        settings = Settings(options.device, True, Path(folder))
        data(settings)
        print(f"{'':<24}{'graphs':>8}{'standby':>9}{'after':>8}{'gap s':>9}  differs")
        rows = measure(settings, options.steps)
    for row in rows:
        print(row)
    compiled_again = rows[-1].graphs[2] > 0
    if compiled_again:
        print("the standby compiled again after the kill")
    return int(compiled_again or any(row.differs for row in rows))


if __name__ == "__main__":
    sys.exit(main())
