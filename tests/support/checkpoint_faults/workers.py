"""Cases with real workers: rank processes with torch, each with a Capturer of its own, and a real
mover process. `python -m tests.support.checkpoint_faults --workers --seed S --cases N` prints them.

Ranks save two steps, and a fault happens. The ranks of the next generation restore onto another
layout through the mover and compare their tensors with torch.equal.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.capture import capturer
from holdfast.checkpoint.capture.capturer import Captured, Capturer, view_of
from holdfast.checkpoint.capture.chunked_copy import Span, move
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.sources import MappedSource, Mixed, StoreSource
from holdfast.core.sharding.boxes import whole
from holdfast.core.sharding.state_table import local_boxes
from holdfast.errors import CorruptError, HoldfastError
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import FolderStore, MissingKeyError
from holdfast.wire.term import open_generation
from tests.support.checkpoint_faults.histories import contents
from tests.support.checkpoint_faults.oracle import expected
from tests.support.mover_process import DTYPE, TABLE, Mover, read_box, state, topology
from tests.support.ranks import RankContext, Server, run_ranks

RANKS = 3
LAYOUTS = ((1, 3), (3, 1))
"""(replicas, dp_shard) of the three ranks."""

RunKind = Callable[["Player", random.Random], str]


class Player:
    """One rank of one case. Rank 0 also has the mover, and does the damage."""

    def __init__(self, ctx: RankContext, number: int, layout: int) -> None:
        self.ctx, self.number = ctx, number
        self.folder = ctx.folder / f"run{number}"
        self.mover: Mover | None = None
        if ctx.rank == 0:
            self.folder.mkdir()
            self._start_mover()
        self.meet("mover")
        self.begin(1, layout, {})
        self.equip()

    # --- processes ----------------------------------------------------------------------------
    def _start_mover(self) -> None:
        if self.mover is not None:
            self.mover.close()
        self.mover = Mover(self.folder, keep_last=5)
        address = {"socket": self.mover.socket, "secret": self.mover.secret.hex()}
        (self.ctx.folder / f"mover{self.number}.json").write_text(json.dumps(address))

    def meet(self, name: str) -> None:
        self.ctx.barrier(f"{self.number}.{name}", 60.0)

    def begin(self, generation: int, layout: int, tried: Mapping[str, str]) -> dict[str, Any]:
        """The generation is opened by rank 0, as an agent does; from what it begins."""
        replicas, dp_shard = LAYOUTS[layout]
        self.topology = topology(replicas, dp_shard, generation)
        address = json.loads((self.ctx.folder / f"mover{self.number}.json").read_text())
        self.client = MoverClient(address["socket"], Secret.from_hex(address["secret"]), generation)
        told = self.ctx.folder / f"start{self.number}.{generation}.json"
        if self.mover is not None:
            open_generation(self.mover.store, generation, {})
            newest = self.client.newest(tried=tried)
            self.client.expect(self.topology, TABLE, start=newest.step)
            told.write_text(json.dumps({"key": newest.key, "step": newest.step}))
        self.meet(f"begun{generation}")
        start: dict[str, Any] = json.loads(told.read_text())
        return start

    def equip(self) -> None:
        """Tensors, and a capturer for them."""
        self.boxes = local_boxes(self.topology, TABLE, self.ctx.rank)
        self.tensors = {
            box.name: torch.zeros(box.lengths, dtype=DTYPE[spec.dtype])
            for box, spec in zip(self.boxes, TABLE, strict=True)
        }
        self.capturer = Capturer(
            self.client, self.topology, TABLE, self.ctx.rank, self.tensors, run="test"
        )

    # --- steps --------------------------------------------------------------------------------
    def compute(self, step: int) -> None:
        full = state(step)
        for box in self.boxes:
            part = view_of(full[box.name], whole(box.name, tuple(full[box.name].shape)), box)
            self.tensors[box.name].copy_(part)

    def save(self, step: int) -> str | None:
        self.compute(step)
        made = self.capturer.capture(step, wait=60)
        if not isinstance(made, Captured):
            return made.reason
        skipped = self.capturer.announce(step, {"position": 16 * step})
        return skipped.reason if skipped else self.capturer.settle(step, 60)

    def restore(self, layout: int) -> int:
        """Generations are opened until one can read what it begins from; the step, of which every
        tensor of every rank was compared."""
        tried: dict[str, str] = {}
        for generation in range(2, 9):
            start = self.begin(generation, layout, tried)
            problem = self._read(start) if start["key"] else None
            said = self.ctx.folder / f"read{self.number}.{generation}"
            Path(f"{said}.{self.ctx.rank}").write_text(problem or "")
            self.meet(f"read{generation}")
            problems = [Path(f"{said}.{rank}").read_text() for rank in range(RANKS)]
            if not any(problems):
                return int(start["step"])
            tried[start["key"]] = next(filter(None, problems))
        raise AssertionError(f"nothing can be restored: {tried}")

    def _read(self, start: dict[str, Any]) -> str | None:
        """Read this rank's boxes from the mover's memory and the run store; return why they are
        corrupt."""
        holdings = self.client.holdings(start["key"])
        mapped = MappedSource(holdings.slots)
        checkpoint = Checkpoint(
            Mixed([mapped, StoreSource(FolderStore(self.folder))]), holdings.commit
        )
        full = state(start["step"])
        boxes = [box for box in local_boxes(self.topology, TABLE, self.ctx.rank) if box.size]
        tensors = [
            torch.full(box.lengths, float("nan"), dtype=full[box.name].dtype) for box in boxes
        ]
        views = [tensor.view(-1).view(torch.uint8).numpy().data for tensor in tensors]
        try:
            checkpoint.read_all(zip(boxes, views, strict=True))
        except (CorruptError, MissingKeyError) as error:
            return str(error)
        for box, tensor in zip(boxes, tensors, strict=True):
            due = view_of(full[box.name], whole(box.name, tuple(full[box.name].shape)), box)
            assert torch.equal(tensor, due), f"SILENTLY WRONG: {box} of step {start['step']}"
        return None

    def new_mover(self) -> None:
        """The mover of the old generation goes, its memory with it, and a new one comes."""
        if self.mover is not None:
            self.mover.kill()
            self._start_mover()

    def close(self) -> None:
        if self.mover is not None:
            self.mover.close()


# --- faults -----------------------------------------------------------------------------------
def flipped(player: Player, rng: random.Random) -> str:
    """A bit in some file of the newest checkpoint."""
    if player.mover is None:
        return ""
    keys = [key for key in contents(player.folder) if "0000000002-rank" in key and "data" in key]
    key = rng.choice([*sorted(keys), "commits/fffffffffffffffd-0000000001.json"])
    path = player.folder / key
    data = bytearray(path.read_bytes())
    data[rng.randrange(4096 if key.startswith("data") else 0, len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"bit flipped in {key}"


def removed(player: Player, rng: random.Random) -> str:
    """A blob of the newest checkpoint is cut, removed, or that of the step before."""
    if player.mover is None:
        return ""
    key = rng.choice(sorted(k for k in contents(player.folder) if "0000000002-rank" in k
                            and k.startswith("data/")))  # fmt: skip
    path = player.folder / key
    how = rng.choice(["cut", "removed", "replayed"])
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "removed":
        path.unlink()
    else:
        older = player.folder / key.replace("0000000002-rank", "0000000001-rank")
        path.write_bytes(older.read_bytes())
    return f"{key} {how}"


def killed_mover(player: Player, rng: random.Random) -> str:
    """SIGKILL to the mover while all ranks save step 3."""
    wait = rng.uniform(0, 0.015)
    killer = threading.Timer(wait, player.mover.kill) if player.mover is not None else None
    if killer is not None:
        killer.start()
    with suppress(HoldfastError):
        player.save(3)
    if killer is not None:
        killer.join()
    return f"the mover got SIGKILL {1000 * wait:.1f} ms into the save"


def half_captured(player: Player, rng: random.Random) -> str:
    """One rank ends in the middle of a copy; the other ranks announce theirs."""
    victim = rng.randrange(RANKS)
    player.compute(3)
    if player.ctx.rank == victim:
        real, capturer.move = capturer.move, _half
        try:
            player.capturer.capture(3)
        finally:
            capturer.move = real
    elif isinstance(player.capturer.capture(3), Captured):
        player.capturer.announce(3, {"position": 48})
    return f"rank {victim} ends in the middle of its copy"


def _half(base: int, spans: Sequence[Span]) -> None:
    move(base, [span._replace(length=span.length // 2) for span in spans[:1]])
    raise RuntimeError("the rank ends here")


def used_again(player: Player, rng: random.Random) -> str:
    """P1: the mover is stopped while it has step 3; the tensors continue to steps 4 and 5."""
    player.compute(3)
    assert isinstance(player.capturer.capture(3, wait=60), Captured)
    assert player.capturer.announce(3, {"position": 48}) is None
    player.meet("announced")
    if player.mover is not None:
        player.mover.process.send_signal(signal.SIGSTOP)
    player.compute(4)
    player.capturer.capture(4)
    player.compute(5)
    player.capturer.capture(5)
    player.meet("went on")
    if player.mover is not None:
        player.mover.process.send_signal(signal.SIGCONT)
    player.capturer.drop(4)
    player.capturer.drop(5)
    assert player.capturer.settle(3, 60) is None
    return "the tensors were used again while they were saved"


KINDS: dict[str, RunKind] = {
    "flipped": flipped, "removed": removed, "killed-mover": killed_mover,
    "half-captured": half_captured, "used-again": used_again,
}  # fmt: skip


def play(ctx: RankContext, seed: int, first: int, count: int) -> list[list[Any]]:
    """The cases [first, first + count); rank 0 returns (number, kind, what, step, due)."""
    seen = []
    for number in range(first, first + count):
        rng = random.Random(f"{seed}/workers/{number}")
        kind = list(KINDS)[number % len(KINDS)]
        layout = rng.randrange(2)
        player = Player(ctx, number, layout)
        try:
            seen.append([number, *_case(player, kind, layout, rng)])
        finally:
            player.close()
    return seen if ctx.rank == 0 else []


def _case(player: Player, kind: str, layout: int, rng: random.Random) -> list[Any]:
    for step in (1, 2):
        reason = player.save(step)
        assert reason is None, reason
    player.meet("saved")
    written = contents(player.folder) if player.mover is not None else {}
    what = KINDS[kind](player, rng)
    player.meet("fault")
    survives = kind != "killed-mover" and rng.random() < 0.4  # the mover, and what it holds
    if not survives:
        player.new_mover()
    player.meet("next")
    step = player.restore(1 - layout)
    due = [3] if kind == "used-again" else [2]
    if player.mover is not None and not survives and kind != "used-again":
        found = contents(player.folder)
        newer = {k: v for k, v in found.items() if "0000000003-rank" in k or "fffc-" in k}
        due = [position[0] for position in expected(found, written | newer).allowed]
    assert player.mover is None or step in due, f"{kind}: {what}: {step} is restored, {due} is due"
    player.equip()
    reason = player.save(6)  # and the run continues from there
    assert reason is None, reason
    player.meet("done")  # then the mover may go
    return [kind, what + (", its memory is there" if survives else ""), step, due]


def dying(ctx: RankContext, folder: Path, at: int) -> None:
    """Save steps 1 and 2; then rank 1 gets SIGKILL in the middle of capturing step 3 (after `at`
    tensors), and the other ranks announce theirs."""
    player = Player(ctx, 0, at % 2)
    player.meet("joined")
    for step in (1, 2):
        assert player.save(step) is None
    player.meet("saved")
    player.compute(3)
    if ctx.rank == 1:

        def some(base: int, spans: Sequence[Span]) -> None:
            move(base, spans[:at])
            os.kill(os.getpid(), signal.SIGKILL)

        capturer.move = some
        player.capturer.capture(3)
    assert isinstance(player.capturer.capture(3), Captured)
    assert player.capturer.announce(3, {"position": 48}) is None
    ctx.mark("announced")
    if ctx.rank == 0:
        assert player.mover is not None
        ctx.wait_mark("announced", 2, 60.0)  # before its generation ends, and with it the mover
        player.client.drain(60)
        survivors = topology(2, 1, 2)
        open_generation(player.mover.store, 2, {})
        newest = player.mover.client(2).newest()
        assert newest.step == 2, newest
        checkpoint = Checkpoint.open(player.mover.store, str(newest.key))
        full = state(2)
        for rank in range(2):
            for box in local_boxes(survivors, TABLE, rank):
                due = view_of(full[box.name], whole(box.name, tuple(full[box.name].shape)), box)
                assert torch.equal(read_box(checkpoint, box), due)
        player.close()


def report(seed: int, first: int, count: int) -> int:
    """Run cases with real workers in ranks of their own, and print them; how many ranks failed."""
    server = Server()
    try:
        args = {"seed": seed, "first": first, "count": count}
        results = run_ranks(play, RANKS, args, deadline=60 + 5.0 * count, address=server.address)
    finally:
        server.close()
    for number, kind, what, step, due in results[0].value or []:
        print(f"workers {number}: {kind}: {what} -> step {step} of {due}")
    for result in results:
        if result.exit != 0:
            print(f"FAILED: rank {result.rank}: {result.ended}\n{result.log}", file=sys.stderr)
    return sum(result.exit != 0 for result in results)
