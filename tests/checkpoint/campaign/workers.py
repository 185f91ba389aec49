"""Cases with real workers: rank processes with torch, each with a Capturer of its own, and a real
mover process. `python -m tests.checkpoint.campaign --workers --seed S --cases N` prints them.

Ranks save two steps, a fault comes, and the ranks of the next generation restore onto another
layout through the mover and compare their tensors with torch.equal.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.capture import Captured, Capturer, view_of
from holdfast.checkpoint.mover_client import MoverClient
from holdfast.checkpoint.restore import Checkpoint
from holdfast.errors import HoldfastError
from holdfast.layout import Topology
from holdfast.spec.boxes import whole
from holdfast.spec.state import local_boxes
from holdfast.wire.runstore import FolderStore
from holdfast.wire.secret import Secret
from tests.checkpoint.campaign.oracle import expected
from tests.checkpoint.campaign.scenes import contents
from tests.checkpoint.support import DTYPE, TABLE, Mover, read_box, state, topology
from tests.ranks import RankContext, Server, run_ranks

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
        self.layout = layout
        self.join(1, layout)

    # --- processes ----------------------------------------------------------------------------
    def _start_mover(self) -> None:
        if self.mover is not None:
            self.mover.close()
        self.mover = Mover(self.folder, keep_last=5)
        address = {"socket": self.mover.socket, "secret": self.mover.secret.hex()}
        (self.ctx.folder / f"mover{self.number}.json").write_text(json.dumps(address))

    def meet(self, name: str) -> None:
        self.ctx.barrier(f"{self.number}.{name}")

    def join(self, generation: int, layout: int) -> None:
        """Become a rank of the generation, with tensors and a capturer."""
        replicas, dp_shard = LAYOUTS[layout]
        self.topology = topology(replicas, dp_shard, generation)
        address = json.loads((self.ctx.folder / f"mover{self.number}.json").read_text())
        secret = Secret.from_hex(address["secret"])
        self.client = MoverClient(address["socket"], secret, generation)
        if self.mover is not None:
            self.mover.begin(self.topology, TABLE)
        self.meet(f"begun{generation}")
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
        made = self.capturer.capture(step, wait=20)
        if not isinstance(made, Captured):
            return made.reason
        skipped = self.capturer.announce(step, {"position": 16 * step})
        return skipped.reason if skipped else self.capturer.settle(step, 20)

    def restore(self, topo: Topology) -> int:
        """Read this rank's boxes of the newest checkpoint; the step, compared bit by bit."""
        newest = self.client.newest()
        if newest.key is None:
            return 0
        checkpoint = Checkpoint.open(FolderStore(self.folder), newest.key)
        full = state(newest.step)
        for box in local_boxes(topo, TABLE, self.ctx.rank):
            due = view_of(full[box.name], whole(box.name, tuple(full[box.name].shape)), box)
            assert torch.equal(read_box(checkpoint, box), due), f"SILENTLY WRONG: {box}"
        return newest.step

    def damage(self) -> None:
        """The mover of the old generation goes, and a new one comes."""
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
    """One rank comes to its end in the middle of a copy; the others announce theirs."""
    victim = rng.randrange(RANKS)
    player.compute(3)
    if player.ctx.rank == victim:
        real, torch._foreach_copy_ = torch._foreach_copy_, _half  # type: ignore[attr-defined]
        try:
            player.capturer.capture(3)
        except _EndedError:
            pass
        finally:
            torch._foreach_copy_ = real  # type: ignore[attr-defined]
    elif isinstance(player.capturer.capture(3), Captured):
        player.capturer.announce(3, {"position": 48})
    return f"rank {victim} ends in the middle of its copy"


class _EndedError(Exception):
    pass


def _half(targets: list[torch.Tensor], sources: list[torch.Tensor], **_: Any) -> None:
    for target, source in zip(targets[:1], sources[:1], strict=True):
        target[: max(1, len(target) // 2)].copy_(source[: max(1, len(source) // 2)])
    raise _EndedError


def used_again(player: Player, rng: random.Random) -> str:
    """P1: the mover is stopped while it has step 3; the tensors go on to steps 4 and 5."""
    player.compute(3)
    assert isinstance(player.capturer.capture(3, wait=20), Captured)
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
    assert player.capturer.settle(3, 20) is None
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
    player.damage()
    player.meet("next")
    player.join(2, 1 - layout)
    player.meet("joined")
    step = player.restore(player.topology)
    due = [step]
    if player.mover is not None:
        found = contents(player.folder)
        newer = {k: v for k, v in found.items() if "0000000003-rank" in k or "fffc-" in k}
        due = [position[0] for position in expected(found, written | newer).allowed]
        assert step in due, f"{kind}: {what}: step {step} is restored, {due} is due"
    player.meet("restored")
    reason = player.save(6)  # and the run goes on from there
    assert reason is None, reason
    return [kind, what, step, due]


def dying(ctx: RankContext, folder: Path, at: int) -> None:
    """Save steps 1 and 2; then rank 1 gets SIGKILL in the middle of capturing step 3 (after `at`
    tensors), and the others announce theirs."""
    player = Player(ctx, 0, at % 2)
    player.meet("joined")
    for step in (1, 2):
        assert player.save(step) is None
    player.meet("saved")
    player.compute(3)
    if ctx.rank == 1:
        real = torch._foreach_copy_

        def some(targets: list[torch.Tensor], sources: list[torch.Tensor], **options: Any) -> None:
            real(targets[:at], sources[:at])
            os.kill(os.getpid(), signal.SIGKILL)

        torch._foreach_copy_ = some  # type: ignore[attr-defined]
        player.capturer.capture(3)
    assert isinstance(player.capturer.capture(3), Captured)
    assert player.capturer.announce(3, {"position": 48}) is None
    if ctx.rank == 0:
        assert player.mover is not None
        player.client.drain(20)
        survivors = topology(2, 1, 2)
        player.mover.begin(survivors)
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
