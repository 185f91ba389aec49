"""Faults that a worker brings about itself, at a named point of a step: the folder of orders.

    <folder>/gate            the step up to which workers may go; left out: as far as they like
    <folder>/7.order         what is to happen, where, when
    <folder>/7.hit           written by the worker that is about to do it, durable: who, when
    <folder>/7.done          an order that waits: whoever ordered it has done its part
    <folder>/wrong           what always comes out NaN: data, wherever it is computed, or a node
    <folder>/slow            ranks, and the seconds that each microbatch takes them longer

`cluster.faults` names the folder; no run without it looks here. Whoever orders writes gate, orders
and `done`; the one worker that makes the `hit` carries an order out, once, whatever is done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

POINTS: dict[str, str] = {
    "begin": "a step is opened",
    "forward": "before the first microbatch",
    "backward": "a gradient has just come out of a backward pass",
    "sending": "before something is handed to another stage of the pipeline",
    "computed": "all microbatches are computed, not everything is reduced",
    "reduced": "the whole gradient is held, and not voted on",
    "voted": "every vote is heard, and nothing is applied",
    "applying": "the update has begun",
    "applied": "the update is made",
    "capture": "the state is being copied into memory",
    "agreeing": "in a recovery: all have met, and are about to agree on the step",
    "regrouping": "in a recovery: it is agreed, and the new groups are about to be made",
    "moving": "in a recovery: state is about to be sent",
    "restoring": "in a recovery: a checkpoint or snapshot is about to be read",
}
RECOVERY = ("agreeing", "regrouping", "moving", "restoring")
"""Points that are no step's: an order for them waits for a generation after `generation`."""


@dataclass(frozen=True)
class Order:
    """One fault in a worker. deed: see `elastic/worker/fault_injection.py`. step: 0 at a point of a
    recovery. rank: counted round where a generation has fewer. generation: it is due in a later
    one."""

    number: int
    fault: str
    deed: str
    point: str
    step: int
    rank: int
    generation: int = 0


@dataclass(frozen=True)
class Wrong:
    """The loss of microbatches from step `first` to `last` is NaN whenever it is computed.
    microbatch: one of each step; None: all. node: only there; "": everywhere. times: it is only so
    many times as large."""

    first: int
    last: int
    microbatch: int | None = None
    node: str = ""
    times: float | None = None

    def hits(self, step: int, microbatch: int, node: str) -> bool:
        here = self.microbatch in (None, microbatch) and self.node in ("", node)
        return here and self.first <= step <= self.last


@dataclass(frozen=True)
class Hit:
    """A worker was about to carry an order out."""

    number: int
    generation: int
    step: int
    rank: int
    pid: int
    node: str


class Armoury:
    """The folder, from both sides."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, Order] = {}

    # --- whoever orders ---------------------------------------------------------------------------
    def prepare(self, gate: int | None = None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if gate is not None:
            self.open_gate(gate)

    def open_gate(self, step: int) -> None:
        self._write("gate", str(step))

    def arm(self, order: Order) -> None:
        self._write(f"{order.number}.order", json.dumps(asdict(order)))

    def disarm(self, number: int) -> None:
        (self.folder / f"{number}.order").unlink(missing_ok=True)

    def hit(self, number: int) -> Hit | None:
        """Who carries the order out; None: nobody did so far."""
        try:
            return Hit(**json.loads((self.folder / f"{number}.hit").read_bytes()))
        except (FileNotFoundError, ValueError):  # not there, or not whole yet
            return None

    def when(self, number: int) -> float:
        """Of a hit: its moment, on this machine's wall clock."""
        return (self.folder / f"{number}.hit").stat().st_mtime

    def done(self, number: int) -> None:
        self._write(f"{number}.done", "")

    def make_wrong(self, *wrong: Wrong) -> None:
        self._write("wrong", json.dumps([asdict(one) for one in wrong]))

    def make_slow(self, seconds: Mapping[int, float]) -> None:
        """By rank, for each microbatch. Of nobody else any more."""
        self._write("slow", json.dumps(dict(seconds)))

    def _write(self, name: str, text: str) -> None:
        """Whole or not at all for whoever reads."""
        path = self.folder / f".{name}.new"
        path.write_text(text)
        path.replace(self.folder / name)

    # --- a worker ---------------------------------------------------------------------------------
    @property
    def gate(self) -> int | None:
        """The step up to which workers may go; None: no bound."""
        try:
            return int((self.folder / "gate").read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    @property
    def wrong(self) -> list[Wrong]:
        try:
            return [Wrong(**one) for one in json.loads((self.folder / "wrong").read_bytes())]
        except FileNotFoundError:
            return []

    def slow(self, rank: int) -> float:
        """Seconds that each microbatch takes this rank longer."""
        try:
            return float(json.loads((self.folder / "slow").read_bytes()).get(str(rank), 0.0))
        except FileNotFoundError:
            return 0.0

    def due(self, point: str, step: int, rank: int, world: int, generation: int) -> Order | None:
        """What this rank is to do here and now, if anything."""
        for order in self._orders():
            if order.point != point or order.rank % world != rank:
                continue
            if order.step not in (0, step) or generation <= order.generation:
                continue
            if not (self.folder / f"{order.number}.hit").exists():
                return order
        return None

    def claim(self, hit: Hit) -> bool:
        """Whether the order is this worker's to carry out. Durable when it returns."""
        try:
            file = os.open(self.folder / f"{hit.number}.hit", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        try:
            os.write(file, json.dumps(asdict(hit)).encode())
            os.fsync(file)
        finally:
            os.close(file)
        return True

    def is_done(self, number: int) -> bool:
        return (self.folder / f"{number}.done").exists()

    def _orders(self) -> Iterator[Order]:
        try:
            names = [name for name in os.listdir(self.folder) if name.endswith(".order")]
        except FileNotFoundError:
            return
        for name in names:
            if name not in self._known:
                with suppress(FileNotFoundError):
                    self._known[name] = Order(**json.loads((self.folder / name).read_bytes()))
            if name in self._known:
                yield self._known[name]
