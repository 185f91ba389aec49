"""A rank with torch and a Capturer is killed in the middle of a capture, next to a real mover."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from holdfast.checkpoint.capture import copy_plan
from holdfast.checkpoint.capture.capturer import Capturer, CompletedCapture
from holdfast.checkpoint.capture.chunked_copy import CopySpan, copy_spans
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.sharding.state_table import local_boxes
from holdfast.wire.secret import Secret
from holdfast.wire.term import create_generation
from tests.support.mover_process import TABLE, Mover, RankState, assert_reads, topology
from tests.support.ranks import RankContext

RANKS = 3
LAYOUTS = ((1, 3), (3, 1))
"""(replicas, dp_shard) of the three ranks."""


def dying(ctx: RankContext, folder: Path, at: int) -> None:
    """Save steps 1 and 2. Then rank 1 gets SIGKILL while it captures step 3, after `at` tensors,
    and the other ranks announce their captures. The next generation must begin from step 2."""
    topo = topology(*LAYOUTS[at % 2])
    rank = RankState(topo, ctx.rank)
    client, mover = _joined(ctx, folder)
    if mover is not None:
        client.expect(topo, TABLE, start_step=client.find_restore_point().step)
    ctx.barrier("begun", 60.0)
    mine = Capturer(client, topo, TABLE, ctx.rank, rank.tensors, run="test")

    def capture(step: int) -> bool:
        rank.compute(step)
        return isinstance(mine.capture(step, wait=60), CompletedCapture)

    for step in (1, 2):
        assert capture(step)
        assert mine.announce(step, {"position": 16 * step}) is None
        assert mine.wait_until_committed(step, 60) is None
    ctx.barrier("saved", 60.0)
    if ctx.rank == 1:

        def some(base: int, spans: Sequence[CopySpan]) -> None:
            copy_spans(base, spans[:at])
            os.kill(os.getpid(), signal.SIGKILL)

        vars(copy_plan)["copy_spans"] = some
    assert capture(3)
    assert mine.announce(3, {"position": 48}) is None
    ctx.mark("announced")
    if mover is not None:
        ctx.wait_mark("announced", 2, 60.0)  # before the generation ends, and the mover with it
        client.drain(60)
        _assert_step_2(mover)
        mover.close()


def _joined(ctx: RankContext, folder: Path) -> tuple[MoverClient, Mover | None]:
    """Return this rank's client of the mover, and on rank 0 the mover itself."""
    told, mover = ctx.folder / "mover.json", None
    if ctx.rank == 0:
        mover = Mover(folder / "run", keep_last=5)
        create_generation(mover.store, 1, {})
        told.write_text(json.dumps({"socket": mover.socket, "secret": mover.secret.hex()}))
    ctx.barrier("mover", 60.0)
    address = json.loads(told.read_text())
    return MoverClient(address["socket"], Secret.from_hex(address["secret"]), 1), mover


def _assert_step_2(mover: Mover) -> None:
    """The newest state is step 2, and the two ranks that are left read it without an error."""
    create_generation(mover.store, 2, {})
    newest = mover.client(2).find_restore_point()
    assert newest.step == 2, newest
    checkpoint = Checkpoint.open(mover.store, str(newest.key))
    for rank in range(2):
        assert_reads(checkpoint, local_boxes(topology(2, 1, 2), TABLE, rank), 2)
