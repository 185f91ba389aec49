"""Runs of other systems that lose a process, over and over: see `recovering/peer_loops.py`."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runtime.children import ROOT, environment
from benchmarks.runtime.recovering.lines import Found, Lines
from benchmarks.runtime.recovering.ours import kill_worker

Mend = Callable[[], None]
"""Brings back what was killed, where the peer does not do so itself."""
LOOPS = "benchmarks.runtime.recovering.peer_loops"
WORLD = 4


@dataclass(frozen=True)
class Peer:
    name: str
    loop: str


PEERS = (Peer("torchft 0.2", "torchft"), Peer("torchrun with DCP", "dcp"), Peer("Ray Train", "ray"))


class Processes:
    """Started processes, all of which are ended at the end."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "log").open("w")
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, **environ: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=self._log,
            env=environment(**environ),
            cwd=ROOT,
            start_new_session=True,
        )
        self.all.append(process)
        return process

    def end(self) -> None:
        for process in self.all:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 10
        for process in self.all:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def measure(
    peer: Peer, python: str, folder: Path, step: float, rounds: int, seconds: float
) -> list[Found]:
    """Raises SilentError."""
    folder.mkdir()
    chosen = random.Random(3)
    found = []
    with _running(peer.loop, python, folder, step) as (processes, mend):
        lines = Lines(
            folder / "lines", lambda: "" if processes.all[0].poll() is None else "it ended", seconds
        )
        after = 0
        for _ in range(rounds):
            known = lines.steady(WORLD, 8, after)
            after = max(line.generation for line in known)
            time.sleep(chosen.uniform(0, step))
            found.append(lines.befall(kill_worker))
            mend()
    return found


@contextmanager
def _running(loop: str, python: str, folder: Path, step: float) -> Iterator[tuple[Processes, Mend]]:
    processes = Processes(folder)
    told = (LOOPS, loop, str(folder), str(step))
    try:
        if loop == "torchft":
            yield processes, _torchft(processes, python, told)
        elif loop == "dcp":
            # torch 2.13 keeps one store over all restarts, without a prefix for each. Restarted
            # processes found the addresses of dead ones, and none came up.
            processes.start(
                python,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={WORLD}",
                "--max-restarts=50",
                "--monitor-interval=0.1",
                "-m",
                *told,
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            )
            yield processes, _nothing
        else:
            processes.start(python, "-m", *told)
            yield processes, _nothing
    finally:
        processes.end()


def _torchft(processes: Processes, python: str, told: tuple[str, ...]) -> Mend:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    processes.start(
        python,
        "-c",
        "import time\nfrom torchft.coordination import LighthouseServer as L\n"
        f"server = L(bind='127.0.0.1:{port}', min_replicas=1, join_timeout_ms=10000, "
        "quorum_tick_ms=20, heartbeat_timeout_ms=500)\nwhile True: time.sleep(60)",
    )
    environ = {"RECOVERY_LIGHTHOUSE": f"http://127.0.0.1:{port}"}

    def replica(number: int) -> subprocess.Popen[bytes]:
        return processes.start(python, "-m", *told, RECOVERY_REPLICA=str(number), **environ)

    groups = {number: replica(number) for number in range(WORLD)}

    def mend() -> None:
        for number, process in groups.items():
            if process.poll() is not None:
                groups[number] = replica(number)

    return mend


def _nothing() -> None:
    return
