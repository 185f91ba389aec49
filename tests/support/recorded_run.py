"""A disturbed run whose journal has a digest of the weights after each step, and the program that
makes `tests/golden/replay` from one (`python -m tests.support.recorded_run`)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

import psutil
import torch

from holdfast.events import StepDone, WorkerReady
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import Outcome, start, write_run_file
from tests.support.followed_run import FollowedRun

FOLDER = Path(__file__).parent.parent / "golden" / "replay"
ARCHIVE = FOLDER / "run.tar.xz"
UNITS = {"ATEN_CPU_CAPABILITY": "avx2"}  # so that most x86 processors can compute the same bits
STEPS = 30
_SMALL = ("train.steps=30", "checkpoint.every_steps=10", "checkpoint.keep_last=2", "model.dim=8")
_LEFT_OUT = shutil.ignore_patterns("secret*", "logs", "*.lock", "*.html")


def disturbed_run(
    root: Path, keys: Sequence[str], *, agent_at: int, kill_at: int, **environ: str
) -> None:
    """Train by three, two and one workers in the folder `root`.

    Three workers and the agent are killed.

    Args:
        keys: settings of the run.
        agent_at: step after which the agent is killed. Two workers continue.
        kill_at: step after which one of those two is killed.
        environ: variables of the run.
    """
    path = write_run_file(root, 40)
    words = ("train", path, *keys, "train.digest_every=1", "train.batch_size=12")

    def train(workers: int, kills: tuple[int, ...], agent_at: int = 0) -> Outcome:
        layout = ("layout.mode=given", f"layout.workers={workers}")
        run = FollowedRun(root / "run", start(*words, *layout, environ=environ))

        def is_done(step: int) -> None:
            run.until(lambda r: isinstance(r.event, StepDone) and r.event.step >= step)

        for at in kills:
            is_done(at)
            alive = [pid for _, pid in sorted(run.pids.items()) if psutil.pid_exists(pid)]
            os.kill(alive[-1], signal.SIGKILL)
        if agent_at:
            is_done(agent_at)
            run.process.kill()
        return run.end()

    train(3, (5, 12), agent_at)
    train(2, (kill_at,)).succeeds()


def main() -> None:
    """Make the archive, and the description of the processor next to it."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        disturbed_run(Path(), _SMALL, agent_at=16, kill_at=23, **UNITS)
        ready = [r.event for r in read_journal(FolderStore(Path("run")))]
        processors = {event.processor for event in ready if isinstance(event, WorkerReady)}
        kept = Path("kept")
        shutil.copytree("run", kept / "run", ignore=_LEFT_OUT)
        shutil.copytree("dataset", kept / "dataset")
        for path in (kept / "run").rglob("*.json"):  # elsewhere its folder is another
            text = path.read_text().replace(f"{os.getcwd()}/", "").replace(os.getcwd(), ".")
            path.write_text(text)
        FOLDER.mkdir(exist_ok=True)
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for path in sorted(kept.iterdir()):
                archive.add(path, path.name, filter=_anonymous)
    model = next(w for w in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in w)
    made_on = {
        "journal": sorted(processors),
        "model": model.partition(":")[2].strip(),
        "hardware": torch.backends.cpu.get_cpu_capability(),
        "variables": UNITS,
        "torch": torch.__version__,
    }
    (FOLDER / "machine.json").write_text(json.dumps(made_on, indent=1) + "\n")
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size:,} bytes")


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main()
