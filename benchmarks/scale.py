"""One coordinator and many agents: what it costs, and how long a generation takes to be decided.

    python -m benchmarks.scale [--agents 64 512 4096] [--seconds 30]

The coordinator is a process of its own; the agents are the agents' own client code over real HTTP
on loopback, many to a process, each with a node whose workers are a switch. Heartbeats come every
2 s (5 s at 4,096), and an agent is lost after three. Measured in the coordinator:

    steady      CPU seconds a second while nothing happens but heartbeats
    fault       one agent reports a broken worker, all halt, hold, and begin the next generation:
                from the report to the last agent's acknowledgement

The floor is a signed request that does nothing, both ends of it in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.elastic.fleet import SECRET, FleetAgent, Switch, until

from holdfast.elastic.coordinator import Coordinator
from holdfast.elastic.following import Follower
from holdfast.policy.membership import Phase, Reign
from holdfast.policy.succession import Patience
from holdfast.wire.runstore import FolderStore
from holdfast.wire.talker import Talker

PROCESSES = 4
JOIN_SECONDS = 240.0


def beat_of(agents: int) -> float:
    return 5.0 if agents > 1024 else 2.0


# --- the agents -------------------------------------------------------------------------------
class Client:
    """An agent that nobody asks: it has no listener."""

    def __init__(self, name: str, store: FolderStore, beat: float) -> None:
        self.work = Switch()
        self.follower = Follower(
            name, "127.0.0.1:1", store, SECRET, self.work, self._never, beat=beat,
            patience=Patience(silence=3 * beat, alone=1e9), told={"address": "127.0.0.1:1"},
        )  # fmt: skip

    async def _never(self, term: object) -> Coordinator:
        raise AssertionError("an agent of this benchmark never leads")


async def agents(folder: Path, first: int, count: int, beat: float) -> None:
    """SIGUSR1: a worker of the first of them breaks."""
    loop, store = asyncio.get_running_loop(), FolderStore(folder)
    clients = [Client(f"n{first + i:05d}", store, beat) for i in range(count)]
    tasks = []
    loop.add_signal_handler(signal.SIGUSR1, lambda: clients[0].work.breaks())
    for client in clients:
        tasks.append(asyncio.create_task(client.follower.run()))
        if len(tasks) % 50 == 0:
            await asyncio.sleep(0.02)  # not all in one moment: a backlog has an end
    await asyncio.gather(*tasks, return_exceptions=True)


# --- the coordinator ----------------------------------------------------------------------------
class Watch:
    """When the reign changed."""

    def __init__(self) -> None:
        self.times: list[tuple[float, Phase, int]] = []

    def __call__(self, old: Reign, new: Reign) -> None:
        if (old.phase, old.generation) != (new.phase, new.generation):
            self.times.append((time.perf_counter(), new.phase, new.generation))

    def decided(self, generation: int) -> float:
        """Seconds from the end of the generation before to the last acknowledgement."""
        halted = max(at for at, phase, number in self.times
                     if phase is Phase.HALTING and number == generation - 1)  # fmt: skip
        at = [at for at, phase, number in self.times
              if phase is Phase.TRAINING and number == generation]  # fmt: skip
        return at[0] - halted


async def lead(folder: Path, count: int, seconds: float) -> dict[str, Any]:
    beat = beat_of(count)
    watch = Watch()
    leader = FleetAgent(
        "coordinator", FolderStore(folder), count + 1, count + 1,
        patience=Patience(silence=3 * beat), beat=beat, lost_after=3 * beat, changed=watch,
    )  # fmt: skip
    await until(lambda: leader.reigns, "the term to be opened")
    each = -(-count // PROCESSES)
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scale", "--role", "agents", str(folder),
             str(first), str(min(each, count - first)), str(beat)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for first in range(0, count, each)
    ]  # fmt: skip
    try:
        return await _measure(leader, children, watch, count, seconds)
    finally:
        for child in children:
            child.kill()
            child.wait()


async def _measure(
    leader: FleetAgent, children: list[subprocess.Popen[bytes]], watch: Watch, count: int,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    coordinator = leader.follower.coordinator
    assert coordinator is not None

    def training(generation: int) -> Callable[[], bool]:
        return lambda: (
            coordinator.reign.phase is Phase.TRAINING and coordinator.reign.generation == generation
        )

    began = time.perf_counter()
    await until(training(1), "all agents to work", JOIN_SECONDS)
    joined = time.perf_counter() - began
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    steady = (time.process_time() - cpu) / (time.perf_counter() - wall)

    decided, costs = [], []
    for generation in range(2, 7):
        cpu = time.process_time()
        children[0].send_signal(signal.SIGUSR1)
        await until(training(generation), f"generation {generation}", 120)
        decided.append(watch.decided(generation))
        costs.append(time.process_time() - cpu)
    return {
        "agents": count, "join": joined, "steady": steady, "decided": decided, "cpu": costs,
        "floor": await _floor(leader.address),
    }  # fmt: skip


async def _floor(address: str) -> float:
    """CPU seconds of this process for a signed request that does nothing, both ends of it."""
    talker = Talker(address, SECRET)
    await talker.post("/term", {})
    began = time.process_time()
    for _ in range(500):
        await talker.post("/term", {})
    talker.close()
    return (time.process_time() - began) / 500


def once(count: int, seconds: float) -> dict[str, Any]:
    """One size, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", "--role", "lead"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, folder, str(count), str(seconds)], stdout=subprocess.PIPE, check=True
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- the table ------------------------------------------------------------------------------------
def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'agents':>7}{'join s':>8}{'steady CPU':>12}{'decided s, median':>19}{'worst':>8}"
          f"{'CPU s a change':>16}{'per agent ms':>14}{'floors':>8}")  # fmt: skip
    for row in rows:
        decided, cpu = sorted(row["decided"]), sorted(row["cpu"])
        middle = cpu[len(cpu) // 2]
        per = middle / row["agents"]
        print(f"{row['agents']:>7}{row['join']:>8.1f}{row['steady']:>12.3f}"
              f"{decided[len(decided) // 2]:>19.3f}{decided[-1]:>8.3f}{middle:>16.3f}"
              f"{1e3 * per:>14.3f}{per / row['floor']:>8.1f}", flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--role", nargs="+", default=[])
    arguments, rest = parser.parse_known_args()
    role = [*arguments.role, *rest]
    if role and role[0] == "agents":
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(agents(Path(role[1]), int(role[2]), int(role[3]), float(role[4])))
        return 0
    if role:
        print(json.dumps(asyncio.run(lead(Path(role[1]), int(role[2]), float(role[3])))))
        return 0
    rows = []
    for count in arguments.agents:
        rows.append(once(count, arguments.seconds))
        print(json.dumps(rows[-1]), flush=True)
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
