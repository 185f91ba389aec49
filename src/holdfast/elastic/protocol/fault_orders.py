"""Faults that a worker causes in itself, at a named point of a step: the folder of orders.

    <folder>/gate            the step up to which workers may go; missing: no limit
    <folder>/7.order         what is to happen, in which rank, and when
    <folder>/7.hit           written by the worker that is about to do it, durable: rank and step
    <folder>/7.done          for an order that waits: the outside part of the fault is done
    <folder>/wrong           what always comes out NaN: data, wherever it is computed, or a node
    <folder>/slow            ranks, and the seconds that each microbatch takes them longer

`cluster.faults` names the folder; no run without it looks here. The injecting program (`holdfast
chaos`, or a test) writes gate, orders and `done`. The one worker that makes the `hit` carries an
order out, once, even if steps are repeated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.json_parsing import JsonMessage

FAULT_POINTS: dict[str, str] = {
    "begin": "a step is opened",
    "forward": "before the first microbatch",
    "backward": "a gradient has just come out of a backward pass",
    "sending": "before something is handed to another stage of the pipeline",
    "changed": "a learner of `outer` has computed its change",
    "computed": "all microbatches are computed, not everything is reduced",
    "reduced": "the complete gradient is held, and not voted on",
    "voted": "every vote is heard, and nothing is applied",
    "applying": "the update has begun",
    "applied": "the update is made",
    "capture": "the state is being copied into memory",
    "agreeing": "in a recovery: all have met, and are about to agree on the step",
    "regrouping": "in a recovery: it is agreed, and the new groups are about to be made",
    "moving": "in a recovery: state is about to be sent",
    "restoring": "in a recovery: a checkpoint or snapshot is about to be read",
}
RECOVERY_POINTS = ("agreeing", "regrouping", "moving", "restoring")
"""Points outside any step: an order for them waits for a generation after `generation`."""


@dataclass(frozen=True)
class FaultOrder(JsonMessage):
    """One fault in a worker.

    deed: see `elastic/worker/fault_injection.py`.
    step: 0 at a point of a recovery.
    rank: taken modulo the number of ranks.
    generation: the order is due in a later one.
    """

    number: int
    fault: str
    deed: str
    point: str
    step: int
    rank: int
    generation: int = 0


@dataclass(frozen=True)
class CorruptLossRule(JsonMessage):
    """Microbatches, from step `first` to `last`, whose loss is NaN whenever it is computed.

    microbatch: one of each step; None: all.
    node: only there; "": everywhere.
    times: the loss is only multiplied by this.
    """

    first: int
    last: int
    microbatch: int | None = None
    node: str = ""
    times: float | None = None

    def applies_to(self, step: int, microbatch: int, node: str) -> bool:
        here = self.microbatch in (None, microbatch) and self.node in ("", node)
        return here and self.first <= step <= self.last


@dataclass(frozen=True)
class FaultHit(JsonMessage):
    """The record of a worker that was about to carry an order out."""

    number: int
    generation: int
    step: int
    rank: int
    pid: int
    node: str


class FaultOrders:
    """The folder, for both sides: the injecting program and the workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._order_cache: dict[str, FaultOrder] = {}

    # --- the injecting program --------------------------------------------------------------------
    def prepare(self, gate: int | None = None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if gate is not None:
            self.open_gate(gate)

    def open_gate(self, step: int) -> None:
        self._write("gate", str(step))

    def arm(self, order: FaultOrder) -> None:
        self._write(f"{order.number}.order", json.dumps(order.to_json()))

    def disarm(self, number: int) -> None:
        (self.folder / f"{number}.order").unlink(missing_ok=True)

    def read_hit(self, number: int) -> FaultHit | None:
        """Return the worker that carries the order out; None: none so far."""
        try:
            return FaultHit.from_json(json.loads((self.folder / f"{number}.hit").read_bytes()))
        except (FileNotFoundError, ValueError):  # not there, or not whole yet
            return None

    def hit_time(self, number: int) -> float:
        """Return the time of a hit, on this machine's wall clock."""
        return (self.folder / f"{number}.hit").stat().st_mtime

    def mark_done(self, number: int) -> None:
        self._write(f"{number}.done", "")

    def set_corrupt_losses(self, *wrong: CorruptLossRule) -> None:
        self._write("wrong", json.dumps([one.to_json() for one in wrong]))

    def set_slow_ranks(self, seconds: Mapping[int, float]) -> None:
        """Set the seconds by rank, for each microbatch. Ranks that are not named are not slowed any
        more."""
        self._write("slow", json.dumps(dict(seconds)))

    def _write(self, name: str, text: str) -> None:
        """Write a file atomically."""
        path = self.folder / f".{name}.new"
        path.write_text(text)
        path.replace(self.folder / name)

    # --- a worker ---------------------------------------------------------------------------------
    @property
    def gate(self) -> int | None:
        """Return the step up to which workers may go; None: no bound."""
        try:
            return int((self.folder / "gate").read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    @property
    def corrupt_loss_rules(self) -> list[CorruptLossRule]:
        try:
            rules = json.loads((self.folder / "wrong").read_bytes())
            return [CorruptLossRule.from_json(one) for one in rules]
        except FileNotFoundError:
            return []

    def slowdown_s(self, rank: int) -> float:
        """Return the seconds that each microbatch takes this rank longer."""
        try:
            return float(json.loads((self.folder / "slow").read_bytes()).get(str(rank), 0.0))
        except FileNotFoundError:
            return 0.0

    def find_due(
        self, point: str, step: int, rank: int, world: int, generation: int
    ) -> FaultOrder | None:
        """Return the order that this rank must carry out here and now, if any."""
        for order in self._read_orders():
            if order.point != point or order.rank % world != rank:
                continue
            if order.step not in (0, step) or generation <= order.generation:
                continue
            if not (self.folder / f"{order.number}.hit").exists():
                return order
        return None

    def claim(self, hit: FaultHit) -> bool:
        """Claim an order; return True if this worker must carry it out. Durable when it returns."""
        try:
            file = os.open(self.folder / f"{hit.number}.hit", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        try:
            os.write(file, json.dumps(hit.to_json()).encode())
            os.fsync(file)
        finally:
            os.close(file)
        return True

    def is_done(self, number: int) -> bool:
        return (self.folder / f"{number}.done").exists()

    def _read_orders(self) -> Iterator[FaultOrder]:
        try:
            names = [name for name in os.listdir(self.folder) if name.endswith(".order")]
        except FileNotFoundError:
            return
        for name in names:
            if name not in self._order_cache:
                with suppress(FileNotFoundError):
                    self._order_cache[name] = FaultOrder.from_json(
                        json.loads((self.folder / name).read_bytes())
                    )
            if name in self._order_cache:
                yield self._order_cache[name]
