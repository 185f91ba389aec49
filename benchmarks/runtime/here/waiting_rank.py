"""One rank on a device that waits: `python -m benchmarks.runtime.here.waiting_rank FILE RANK`.

The process, its schedule's table, its messages and their sockets are real. Computing is a wait of
the seconds that FILE gives. A link is shaped where a rank sends. Messages leave one after the
other, at the link's rate, and arrive after its latency.

No process wakes exactly in time. So a rank counts from the moment at which a wait should have
ended, unless it is later than `PAUSE`. (An accelerator with queued work behaves so.) The rank
prints the seconds of each step.
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path
from typing import Any

from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import Action, ActionKind, Schedule, actions_of
from holdfast.layout import coordinates_of, index_of

PAUSE = 0.003
HEADER = struct.Struct(">Hid")  # bytes of the tag, bytes of the message, when it should arrive


@dataclass(frozen=True)
class WaitingLayer:
    """Seconds of one microbatch, and bytes: of a sum over tp, of gradients, of parameters."""

    forward: float
    inputs: float
    weights: float
    sums: int
    sum_bytes: float
    gradient_bytes: float
    bucket_bytes: float  # of the gradients, as all ranks that share them count
    weight_bytes: float


class Clock:
    """The time of a device, or of one of its engines for messages."""

    def __init__(self, at: float = 0.0):
        self.at = at

    def meet(self, moment: float) -> None:
        """Continue no earlier than that."""
        self.at = max(self.at, moment)
        if (now := time.monotonic()) > self.at + PAUSE:
            self.at = now

    def wait(self, seconds: float) -> None:
        self.at += seconds
        while (left := self.at - time.monotonic()) > 0:
            time.sleep(left)


class Line:
    """Sockets to all ranks, and a thread for each link that messages leave by."""

    def __init__(self, folder: Path, rank: int, ranks: int, per_node: int, links: dict[str, Any]):
        self.rank, self._folder, self._per_node = rank, folder, per_node
        self._arrived: dict[str, float] = {}
        self._news = threading.Condition()
        self._peers: dict[int, socket.socket] = {}
        self._one_writes = [threading.Lock() for _ in range(ranks)]
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(folder / f"{rank}.sock"))
        self._server.listen(ranks)
        (folder / f"{rank}.ready").touch()
        threading.Thread(target=self._accept, daemon=True).start()
        while not all((folder / f"{each}.ready").exists() for each in range(ranks)):
            time.sleep(0.01)
        self._queues: dict[str, queue.Queue[tuple[float, int, str, int]]] = {}
        for name, (latency, rate) in links.items():
            self._queues[name] = queue.Queue()
            at = (self._queues[name], latency, rate)
            threading.Thread(target=self._send_all, args=at, daemon=True).start()

    def send(self, ready: float, peer: int, tag: str, size: float) -> None:
        """Begin to send; `ready`: when the device had it."""
        inside = self.rank // self._per_node == peer // self._per_node
        self._queues["inside" if inside else "outside"].put((ready, peer, tag, max(1, int(size))))

    def receive(self, tag: str) -> float:
        """Wait for a message; when it should have arrived."""
        with self._news:
            self._news.wait_for(lambda: tag in self._arrived)
            return self._arrived.pop(tag)

    def tell(self, peer: int, tag: str, moment: float) -> None:
        """A word that takes no link."""
        self._write(peer, tag, b"", moment)

    def _send_all(
        self, waiting: queue.Queue[tuple[float, int, str, int]], latency: float, rate: float
    ) -> None:
        free = 0.0
        while True:
            ready, peer, tag, size = waiting.get()
            free = max(ready, free) + size / rate
            due = free + latency
            while (left := due - time.monotonic()) > 0:
                time.sleep(left)
            self._write(peer, tag, bytes(size), due)

    def _write(self, peer: int, tag: str, data: bytes, moment: float) -> None:
        name = tag.encode()
        with self._one_writes[peer]:
            if peer not in self._peers:
                self._peers[peer] = socket.socket(socket.AF_UNIX)
                self._peers[peer].connect(str(self._folder / f"{peer}.sock"))
            self._peers[peer].sendall(HEADER.pack(len(name), len(data), moment) + name + data)

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with connection.makefile("rb", buffering=1 << 20) as source:
            while head := source.read(HEADER.size):
                name, size, moment = HEADER.unpack(head)
                tag = source.read(name).decode()
                source.read(size)
                with self._news:
                    self._arrived[tag] = moment
                    self._news.notify_all()


class Engine:
    """Collectives one after the other, next to the device's computing."""

    def __init__(self, line: Line):
        self._line, self.clock = line, Clock()
        self._asked: queue.Queue[Callable[[], None]] = queue.Queue()
        self._done: dict[str, float] = {}
        self._news = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def start(
        self, ready: float, name: str, group: Sequence[int], size: float, both: bool = False
    ) -> None:
        """A ring's gather or scatter, or with `both` its all-reduce, of `size` bytes."""

        def run() -> None:
            self.clock.meet(ready)
            ring(self._line, self.clock, name, group, size, both)
            with self._news:
                self._done[name] = self.clock.at
                self._news.notify_all()

        self._asked.put(run)

    def wait(self, name: str) -> float:
        with self._news:
            self._news.wait_for(lambda: name in self._done)
            return self._done.pop(name)

    def _work(self) -> None:
        while True:
            self._asked.get()()


def ring(
    line: Line, clock: Clock, name: str, group: Sequence[int], size: float, both: bool
) -> None:
    number, at = len(group), group.index(line.rank)
    for turn in range((number - 1) * (2 if both else 1)):
        line.send(clock.at, group[(at + 1) % number], f"{name}/{turn}", size / number)
        clock.meet(line.receive(f"{name}/{turn}"))


def replicas_of(given: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """The first rank and the kind of each replica."""
    found, first = [], 0
    for kind in given["kinds"]:
        for _ in range(kind["replicas"]):
            found.append((first, kind))
            first += prod(kind["mesh"])
    return found


def numbers(kind: dict[str, Any], stage: int) -> range:
    """The layers of a stage, counted from the embedding."""
    before = sum(map(len, kind["stages"][:stage]))
    return range(before, before + len(kind["stages"][stage]))


class WaitingRank:
    """A rank of one layout."""

    def __init__(self, given: dict[str, Any], rank: int, line: Line):
        self.given, self.line, self.device = given, line, Clock()
        every = replicas_of(given)
        self.replica = max(i for i, (first, _) in enumerate(every) if first <= rank)
        self.first, kind = every[self.replica]
        self.kind, self.mesh = kind, kind["mesh"]
        self.at = coordinates_of(rank - self.first, self.mesh)
        pp, self.microbatches = self.mesh[0], kind["microbatches"]
        self.schedule: Schedule = build_schedule(
            given["schedule"], pp, self.microbatches, given["virtual"]
        )
        self.layers = [[WaitingLayer(**each) for each in stage] for stage in kind["stages"]]
        self.tp, self.shards = self._along(3), self._along(1)
        self.rings = [
            [self._rings(every, number) for number in numbers(kind, stage)]
            for stage in range(len(self.layers))
        ]
        self.sums, self.gathers = Engine(line), Engine(line)

    def _along(self, axis: int) -> list[int]:
        """The ranks that differ from this one on one axis only."""
        at = list(self.at)
        found = []
        for index in range(self.mesh[axis]):
            at[axis] = index
            found.append(self.first + index_of(at, self.mesh))
        return found

    def _rank_of(self, stage: int) -> int:
        at = (self.schedule.rank_of[stage], *self.at[1:])
        return self.first + index_of(at, self.mesh)

    def _rings(
        self, every: Sequence[tuple[int, dict[str, Any]]], layer: int
    ) -> dict[tuple[int, ...], float]:
        """The ranks that share the gradients of a layer with this one, with the share of this
        rank's gradients that they have in common."""
        pieces = lcm(*(kind["mesh"][1] * kind["mesh"][3] for _, kind in every))
        groups = Counter(
            tuple(self._holder(first, kind, layer, piece / pieces) for first, kind in every)
            for piece in range(pieces)
        )
        own = {group: n for group, n in groups.items() if self.line.rank in group}
        return {group: number / sum(own.values()) for group, number in own.items()}

    def _holder(self, first: int, kind: dict[str, Any], layer: int, part: float) -> int:
        """The rank of a replica that has a part of a layer, by where the part begins: 0 to 1."""
        mesh, given = kind["mesh"], self.given
        number = next(i for i, _ in enumerate(kind["stages"]) if layer in numbers(kind, i))
        schedule = build_schedule(
            given["schedule"], mesh[0], kind["microbatches"], given["virtual"]
        )
        shard, tp = divmod(int(part * mesh[1] * mesh[3] + 1e-9), mesh[3])
        at = (schedule.rank_of[number], shard, self.at[2], tp)
        return first + int(index_of(at, mesh))

    def step(self, number: int, begin: float) -> float:
        """Run a step; its seconds on this rank."""
        self.device.at = begin
        self.device.wait(0.0)
        self.done = dict.fromkeys(range(len(self.layers)), 0)
        self.waited: list[tuple[Engine, str]] = []
        self.bucket, self.counted, self.number = 0.0, 0.0, number
        self.exchanges_with = Counter[tuple[int, ...]]()
        for cell in self.schedule.actions[self.at[0]]:
            for action in actions_of(cell):
                self._run(number, action)
        for engine, name in self.waited:
            self.device.meet(engine.wait(name))
        self.device.wait(self.given["update_s"])
        held = [layer for s in self.schedule.stages_of(self.at[0]) for layer in self.layers[s]]
        if len(self.shards) > 1 and self.given["zero"] < 3:
            size = sum(layer.weight_bytes for layer in held)
            name = f"{number}/gather/{self.shards[0]}"
            ring(self.line, self.device, name, self.shards, size, False)
        return self.device.at - begin

    def _run(self, step: int, action: Action) -> None:
        stage, kind = action.stage, action.kind
        name = f"{step}/{action.microbatch}/{stage}/{kind.value}"
        last = len(self.layers) - 1
        if kind is ActionKind.FORWARD:
            self._take(f"{step}/{action.microbatch}/{stage}/in", stage > 0 and stage - 1)
            self._pass(name, stage, self.layers[stage], "forward")
            self._give(f"{step}/{action.microbatch}/{stage + 1}/in", stage < last and stage + 1)
            return
        if kind is not ActionKind.BACKWARD_WEIGHT:
            self._take(f"{step}/{action.microbatch}/{stage}/back", stage < last and stage + 1)
            self._pass(name, stage, self.layers[stage][::-1], str(kind.value))
            self._give(f"{step}/{action.microbatch}/{stage - 1}/back", stage > 0 and stage - 1)
        else:
            self._pass(name, stage, self.layers[stage][::-1], str(kind.value))

    def _take(self, tag: str, source: int | bool) -> None:
        if source is not False and self._rank_of(int(source)) != self.line.rank:
            self.device.meet(self.line.receive(f"{tag}/{self.at[1:]}/{self.replica}"))

    def _give(self, tag: str, target: int | bool) -> None:
        if target is not False and (peer := self._rank_of(int(target))) != self.line.rank:
            tag = f"{tag}/{self.at[1:]}/{self.replica}"
            self.line.send(self.device.at, peer, tag, self.kind["send_bytes"])

    def _pass(self, name: str, stage: int, layers: Sequence[WaitingLayer], kind: str) -> None:
        """kind: forward, or the letter of a backward: B, I or W."""
        ends = kind in ("B", "W")
        self.done[stage] += ends
        shards, is_cut = self.shards, self.given["zero"] == 3 and len(self.shards) > 1
        is_cut = is_cut and kind != "W"
        for at, layer in enumerate(layers):
            if is_cut:
                self._gather(name, at, layer)
                if at + 1 < len(layers):
                    self._ask(name, at + 1, layers[at + 1])
                self.device.meet(self.gathers.wait(f"{name}/{at}/{shards[0]}"))
            seconds = {"forward": layer.forward, "I": layer.inputs, "W": layer.weights}
            self.device.wait(seconds.get(kind, layer.inputs + layer.weights))
            if kind != "W" and len(self.tp) > 1:
                for each in range(2 * layer.sums):
                    tag = f"{name}/{at}/{each}/{self.tp[0]}"
                    ring(self.line, self.device, tag, self.tp, layer.sum_bytes, False)
            if ends:
                is_last = self.done[stage] == self.microbatches
                rings = self.rings[stage][::-1]
                is_end = at + 1 == len(layers) or rings[at + 1] != rings[at]
                self._reduce(f"{name}/{at}", layer, rings[at], is_last, is_end)

    def _ask(self, name: str, at: int, layer: WaitingLayer) -> None:
        tag = f"{name}/{at}/{self.shards[0]}"
        self.gathers.start(self.device.at, tag, self.shards, layer.weight_bytes)

    def _gather(self, name: str, at: int, layer: WaitingLayer) -> None:
        if at == 0:
            self._ask(name, at, layer)

    def _reduce(
        self,
        name: str,
        layer: WaitingLayer,
        rings: dict[tuple[int, ...], float],
        is_last: bool,
        is_end: bool,
    ) -> None:
        """Sums of gradients: over shards, then over replicas. A bucket of them leaves when it is
        full, or with the last layer that the same ranks have."""
        cut, is_cut = len(self.shards), self.given["zero"] == 3
        if cut > 1 and is_cut:
            self._sum(f"{name}/s/{self.shards[0]}", self.shards, layer.gradient_bytes, False)
        if not is_last:
            return
        self.bucket += layer.gradient_bytes
        self.counted += layer.bucket_bytes
        if self.counted < self.given["bucket_bytes"] and not is_end:
            return
        size, self.bucket, self.counted = self.bucket, 0.0, 0.0
        if cut > 1 and not is_cut:
            self._sum(f"{name}/s/{self.shards[0]}", self.shards, size, False)
        for group, share in rings.items():
            if len(group) > 1:
                name = f"{self.number}/r/{group}/{self.exchanges_with[group]}"
                self.exchanges_with[group] += 1
                self._sum(name, group, share * size / cut, True)

    def _sum(self, name: str, group: Sequence[int], size: float, both: bool) -> None:
        self.sums.start(self.device.at, name, group, size, both)
        self.waited.append((self.sums, name))


def main(file: str, number: str) -> None:
    given, rank = json.loads(Path(file).read_text()), int(number)
    first, last = replicas_of(given)[-1]
    ranks = first + prod(last["mesh"])
    line = Line(Path(file).parent, rank, ranks, given["per_node"], given["links"])
    runner = WaitingRank(given, rank, line)
    for step in range(given["steps"]):
        if rank == 0:
            for peer in range(1, ranks):
                line.receive(f"ready/{step}/{peer}")
            begin = time.monotonic() + 0.05
            for peer in range(1, ranks):
                line.tell(peer, f"go/{step}", begin)
        else:
            line.tell(0, f"ready/{step}/{rank}", 0.0)
            begin = line.receive(f"go/{step}")
        print(json.dumps(runner.step(step, begin)), flush=True)
    for peer in range(ranks):  # a rank stays while another one may still send to it
        line.tell(peer, f"end/{rank}", 0.0)
    for peer in range(ranks):
        line.receive(f"end/{peer}")


if __name__ == "__main__":
    main(*sys.argv[1:])
