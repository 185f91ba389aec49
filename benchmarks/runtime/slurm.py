"""From the command to the first step on four nodes of a Slurm, against `srun torchrun`.

    python -m benchmarks.runtime.slurm [--rounds 3]

A Slurm of four nodes is brought up on this machine. In turns, each round measures:

    ours      `holdfast launch --on slurm --nodes 4`, until the first step is in the journal
    torchrun  `srun -N4 torchrun` of a minimal DDP loop with the same model, until its first step
    floor     `srun -N4 python -c 'import torch'`

The dataset is prepared before. torchrun reads no data and asks for no batch job, so it has less to
do. Needs apt's Slurm; exit code 2 without it.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.journal_reader import Journal
from tests.support.nodes import prepared
from tests.support.slurm_cluster import INSTALL, SlurmCluster, is_installed, slurm_of

from holdfast.events import StepDone

NODES = 4
LIMIT_S = 180.0
SETTINGS = (
    f"layout.workers={NODES}",
    "cluster.places=1",
    "cluster.threads_per_worker=1",
    "train.steps=3",
    "train.evaluate.every=0",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    if not is_installed():
        print(INSTALL)
        return 2
    scratch = Path(tempfile.mkdtemp(prefix="slurm-start-"))
    found: dict[str, list[float]] = {"ours": [], "torchrun": [], "floor": []}
    try:
        run_file = prepared(scratch / "data")
        with slurm_of(NODES) as cluster:
            for number in range(rounds):
                found["ours"].append(_ours(cluster, run_file, scratch / f"run{number}"))
                found["torchrun"].append(_torchrun(cluster, run_file, scratch / f"ddp{number}"))
                found["floor"].append(_floor(cluster))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for name, seconds in found.items():
        each = ", ".join(f"{value:.1f}" for value in seconds)
        print(f"{name:<10} median {statistics.median(seconds):5.1f} s  ({each})")
    return 0


def _ours(cluster: SlurmCluster, run_file: Path, folder: Path) -> float:
    begun = time.time()
    command = [sys.executable, "-m", "holdfast.cli.main", "launch", str(run_file)]
    options = ["--on", "slurm", "--nodes", str(NODES), f"folder={folder}", *SETTINGS]
    subprocess.run([*command, *options], env=cluster.environment, check=True, capture_output=True)
    journal, done = Journal(folder), list[float]()
    deadline = begun + LIMIT_S
    while not done:
        if time.time() > deadline:
            raise TimeoutError(f"no step within {LIMIT_S:.0f} s")
        time.sleep(0.05)
        done = [r.time for r in journal.records() if isinstance(r.event, StepDone)]
    cluster.wait_until(lambda: not cluster.run("squeue", "-h"), "the job ends")
    return min(done) - begun


def _torchrun(cluster: SlurmCluster, run_file: Path, out: Path) -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES}"]
    program += ["--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    script = str(Path(__file__).with_name("slurm_ddp.py"))
    begun = time.time()
    _srun(cluster, *program, script, str(run_file), str(out))
    return float(out.read_text()) - begun


def _floor(cluster: SlurmCluster) -> float:
    begun = time.time()
    _srun(cluster, sys.executable, "-c", "import torch")
    return time.time() - begun


def _srun(cluster: SlurmCluster, *program: str) -> None:
    command = ["srun", f"--nodes={NODES}", "--ntasks-per-node=1", "--exclusive", *program]
    environment = cluster.environment | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
