"""One coordinator and many agents: cost, and the time to decide on a generation.

    python -m benchmarks.lab.scale [--agents 64 512 4096] [--seconds 30] [--changes 5]

The coordinator is a process of its own. The agents are the agents' own client code over real HTTP
on loopback, many to a process. Each has a node whose workers are a switch. Heartbeats come every 2
s (5 s at 4,096), and an agent is lost after three. Measured:

    steady      CPU seconds a second of the coordinator, and of all agents together, while nothing
                happens but heartbeats
    change      one agent reports a broken worker; all halt, hold, begin the next generation, work.
                From that report to the last agent's acknowledgement
    lost        one agent falls silent: from the moment it is given up to the last acknowledgement
                of a generation without it
    floor       what a signed request that does nothing costs the same server, in the same run

Agents and coordinator share the machine, so a change takes as long as both together need. One thing
differs from separate machines. All agents of a process share one reading and parsing of a
generation's object in the run store (`read` says how long that takes).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.agents import SECRET, FleetAgent, Switch, until

from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.membership.role_loop import RoleLoop
from holdfast.elastic.protocol.coordinator_messages import Heartbeat, HeartbeatReply
from holdfast.elastic.protocol.generation_record import GenerationRecord, read_record
from holdfast.policy.membership.election import ElectionTimeouts
from holdfast.policy.membership.transitions import CoordinatorState, Phase
from holdfast.wire.http.async_client import AsyncClient
from holdfast.wire.store.run_store import FolderStore

PROCESSES = 4
JOIN_SECONDS = 240.0
LINES, ASKED = 16, 200
"""Connections of each process of agents, and requests on each, that the floor is taken of."""


def beat_of(agents: int) -> float:
    return 5.0 if agents > 1024 else 2.0


# --- the agents -------------------------------------------------------------------------------
class Reading:
    """What generations' objects say, each read once."""

    def __init__(self, store: FolderStore) -> None:
        self._store = store
        self._read: dict[int, asyncio.Task[GenerationRecord]] = {}

    async def __call__(self, generation: int) -> GenerationRecord:
        if generation not in self._read:
            self._read = {generation: asyncio.create_task(read_record(self._store, generation))}
        return await self._read[generation]


class Client:
    """An agent that answers nothing. At its address something listens: a port that refuses
    connections says that its agent has ended."""

    def __init__(
        self, name: str, address: str, store: FolderStore, beat: float, read: Reading
    ) -> None:
        self.work = Switch()
        self.follower = RoleLoop(
            name,
            address,
            store,
            SECRET,
            self.work,
            self._never,
            heartbeat_interval_s=beat,
            timeouts=ElectionTimeouts(leader_timeout_s=3 * beat, minority_wait_s=1e9),
            read_generation=read,
        )

    async def _never(self, term: object) -> Coordinator:
        raise AssertionError("an agent of this benchmark never leads")


async def agents(folder: Path, first: int, count: int, beat: float) -> None:
    """Obey commands on standard input, a line each, and report when each is done. They are `break`
    (a worker of the first agent), `stop` (the last remaining agent), `floor ADDRESS` and `cpu`."""
    store = FolderStore(folder)
    read = Reading(store)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    clients = [Client(f"n{first + i:05d}", address, store, beat, read) for i in range(count)]
    tasks = []
    for client in clients:
        tasks.append(asyncio.create_task(client.follower.run()))
        if len(tasks) % 50 == 0:
            await asyncio.sleep(0.02)  # not all in one moment: a backlog has an end
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    while line := (await lines.readline()).decode().split():
        said = ""
        match line[0]:
            case "break":
                clients[0].work.breaks()
            case "stop":
                tasks.pop().cancel()
            case "floor":
                await _ask_much(line[1])
            case "cpu":
                said = str(time.process_time())
        print(said, flush=True)


async def _ask_much(address: str) -> None:
    async def ask() -> None:
        talker = AsyncClient(address, SECRET)
        for _ in range(ASKED):
            await talker.post("/term", {})
        talker.close()

    await asyncio.gather(*(ask() for _ in range(LINES)))


class Crowd:
    """The processes of agents."""

    def __init__(self, folder: Path, count: int, beat: float) -> None:
        each = -(-count // PROCESSES)
        self._children = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.lab.scale",
                    "--role",
                    "agents",
                    str(folder),
                    str(first),
                    str(min(each, count - first)),
                    str(beat),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for first in range(0, count, each)
        ]

    def do(self, line: str, which: int | None = None) -> list[str]:
        """Say it to one or all of them; what they answer, once all have done it."""
        asked = self._children if which is None else [self._children[which]]
        for child in asked:
            assert child.stdin is not None
            print(line, file=child.stdin, flush=True)
        return [child.stdout.readline().strip() for child in asked if child.stdout is not None]

    async def cpu(self) -> float:
        return sum(map(float, await asyncio.to_thread(self.do, "cpu")))

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()


# --- the coordinator ----------------------------------------------------------------------------
class Watch:
    """When the reign changed."""

    def __init__(self) -> None:
        self.times: list[tuple[float, Phase, int]] = []

    def __call__(self, old: CoordinatorState, new: CoordinatorState) -> None:
        if (old.phase, old.generation) != (new.phase, new.generation):
            self.times.append((time.perf_counter(), new.phase, new.generation))

    def decided(self, generation: int) -> float:
        """Seconds from the end of the generation before to the last acknowledgement."""
        halted = max(
            at
            for at, phase, number in self.times
            if phase is Phase.HALTING and number == generation - 1
        )
        at = [
            at
            for at, phase, number in self.times
            if phase is Phase.TRAINING and number == generation
        ]
        return at[0] - halted


class Measured:
    """CPU seconds of the coordinator and of its agents, since it was made."""

    def __init__(self, crowd: Crowd, agents: float) -> None:
        self._crowd, self._agents = crowd, agents
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    @staticmethod
    async def begin(crowd: Crowd) -> Measured:
        return Measured(crowd, await crowd.cpu())

    async def end(self) -> tuple[float, float, float]:
        """Coordinator, agents, wall."""
        own, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        return own, await self._crowd.cpu() - self._agents, wall


async def lead(folder: Path, count: int, seconds: float, changes: int) -> dict[str, Any]:
    beat = beat_of(count)
    watch = Watch()
    leader = FleetAgent(
        "coordinator",
        FolderStore(folder),
        count // 2,
        count + 1,
        patience=ElectionTimeouts(leader_timeout_s=3 * beat),
        beat=beat,
        lost_after=3 * beat,
        changed=watch,
        gather=JOIN_SECONDS,
    )
    await until(lambda: leader.reigns, "the term to be opened")
    crowd = Crowd(folder, count, beat)
    try:
        return await _measure(leader, crowd, watch, count, seconds, changes)
    finally:
        crowd.close()


async def _measure(
    leader: FleetAgent, crowd: Crowd, watch: Watch, count: int, seconds: float, changes: int
) -> dict[str, Any]:
    coordinator = leader.follower.coordinator
    assert coordinator is not None
    requests = _counted(coordinator)

    def training(generation: int) -> Callable[[], bool]:
        return lambda: (
            coordinator.state.phase is Phase.TRAINING and coordinator.state.generation == generation
        )

    began = time.perf_counter()
    await until(training(1), "all agents to work", JOIN_SECONDS)
    joined = time.perf_counter() - began
    measured = await Measured.begin(crowd)
    await asyncio.sleep(seconds)
    own, theirs, wall = await measured.end()
    steady = own / wall, theirs / wall

    rows: list[tuple[float, float, float, float]] = []
    for generation in range(2, 2 + changes):
        requests.clear()
        measured = await Measured.begin(crowd)
        await asyncio.to_thread(crowd.do, "break", 0)
        await until(training(generation), f"generation {generation}", 120)
        own, theirs, _ = await measured.end()
        rows.append((watch.decided(generation), own, theirs, len(requests) / count))
        await asyncio.sleep(0.5)
    generation = 2 + changes
    await asyncio.to_thread(crowd.do, "stop", 0)
    await until(training(generation), "a generation without the one that is silent", 120)

    measured = await Measured.begin(crowd)
    await asyncio.to_thread(crowd.do, f"floor {leader.address}")
    own, theirs, _ = await measured.end()
    asked = PROCESSES * LINES * ASKED
    began = time.perf_counter()
    await read_record(leader.store, generation)
    return {
        "agents": count,
        "join": joined,
        "steady": steady,
        "lost": watch.decided(generation),
        "decided": [row[0] for row in rows],
        "cpu": [row[1] for row in rows],
        "agents cpu": [row[2] for row in rows],
        "requests": [row[3] for row in rows],
        "floor": own / asked,
        "agents floor": theirs / asked,
        "read": time.perf_counter() - began,
    }


def _counted(coordinator: Coordinator) -> list[int]:
    """Gets an entry for every question that the coordinator is asked from now on."""
    found: list[int] = []
    beat = coordinator.handle_heartbeat

    async def counted(_: int, said: Heartbeat) -> HeartbeatReply:
        found.append(1)
        return await beat(_, said)

    coordinator.handle_heartbeat = counted  # type: ignore[method-assign]
    return found


def once(count: int, seconds: float, changes: int) -> dict[str, Any]:
    """One size, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.lab.scale", "--role", "lead"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, folder, str(count), str(seconds), str(changes)],
            stdout=subprocess.PIPE,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- the table ------------------------------------------------------------------------------------
def show(rows: list[dict[str, Any]]) -> None:
    print(
        "| agents | joined s | steady: coordinator, agents (cores) | decided s: median, worst "
        "| a lost agent s | requests an agent | coordinator: CPU s, ms an agent "
        "| agents: CPU s | floor ms: coordinator, agents |"
    )
    print("|" + "---|" * 9)
    for row in rows:
        cpu = statistics.median(row["cpu"])
        print(
            f"| {row['agents']} | {row['join']:.1f} "
            f"| {row['steady'][0]:.3f}, {row['steady'][1]:.3f} "
            f"| {statistics.median(row['decided']):.3f}, {max(row['decided']):.3f} "
            f"| {row['lost']:.3f} | {statistics.median(row['requests']):.1f} "
            f"| {cpu:.2f}, {1e3 * cpu / row['agents']:.2f} "
            f"| {statistics.median(row['agents cpu']):.2f} "
            f"| {1e3 * row['floor']:.3f}, {1e3 * row['agents floor']:.3f} |"
        )
    print("\nCPU of the coordinator for a change, ms an agent (level: it grows as they do)")
    _bars({row["agents"]: 1e3 * statistics.median(row["cpu"]) / row["agents"] for row in rows})
    print("\nseconds to decide a generation")
    _bars({row["agents"]: statistics.median(row["decided"]) for row in rows})


def _bars(values: dict[int, float], width: int = 60) -> None:
    most = max(values.values())
    for agents, value in values.items():
        print(f"{agents:>6} {'#' * max(1, round(width * value / most)):<{width}} {value:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--changes", type=int, default=5)
    parser.add_argument("--role", nargs="+", default=[])
    arguments, rest = parser.parse_known_args()
    role = [*arguments.role, *rest]
    if role and role[0] == "agents":
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(agents(Path(role[1]), int(role[2]), int(role[3]), float(role[4])))
        return 0
    if role:
        led = lead(Path(role[1]), int(role[2]), float(role[3]), int(role[4]))
        print(json.dumps(asyncio.run(led)))
        return 0
    rows = [once(count, arguments.seconds, arguments.changes) for count in arguments.agents]
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
