"""A rank that is killed in the middle of a copy that hides.

It captures and announces step 1, takes step 2, and begins to copy that. At a piece its copying
thread kills the process with SIGKILL, while the training thread computes. If the copy has no such
piece, the rank ends by itself and returns the number of pieces.
"""

from __future__ import annotations

import os
import signal
from functools import partial

import torch

from holdfast.checkpoint.capture.capturer import Capturer, CompletedCapture
from holdfast.checkpoint.capture.chunked_copy import ChunkedCopy, Piece
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.wire.secret import Secret
from tests.support.mover_process import topology
from tests.support.ranks import RankContext

ROWS = 3 * 2**20
TABLE = (TensorSpec("w", "F32", (ROWS,), 0), TensorSpec("b", "F32", (7,), 0))  # 12 MiB and a bit


def fill(tensors: dict[str, torch.Tensor], step: int) -> None:
    tensors["w"].copy_(torch.arange(ROWS) * 3.0 + step)
    tensors["b"].fill_(-step)


def die_while_copying(
    rank: RankContext, socket: str, secret: str, generation: int, point: int
) -> int:
    client = MoverClient(socket, Secret(bytes.fromhex(secret)), generation)
    tensors = {"w": torch.zeros(ROWS), "b": torch.zeros(7)}
    topo = topology(generation=generation)
    capturer = Capturer(client, topo, TABLE, 0, tensors, run="test")
    fill(tensors, 1)
    assert isinstance(capturer.capture(1), CompletedCapture)
    assert capturer.announce(1, {"position": 16}) is None
    assert capturer.wait_until_committed(1, 60) is None
    fill(tensors, 2)
    count = 0

    def counted(piece: Piece) -> None:
        nonlocal count
        piece()
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    behind = capturer._copy_plan.background_pieces
    capturer._copy_plan.background_pieces = lambda slot: [partial(counted, p) for p in behind(slot)]  # type: ignore
    copy = capturer.begin(2)
    assert isinstance(copy, ChunkedCopy)
    while not copy.is_done:  # to the thread this is the next step
        torch.ones(1000).sum()
    return count
