"""Restoring after a fault, and the verdict.

The real path: the newest checkpoint that can be trusted is looked for, and every rank of some
other layout reads its boxes. Buffers are marked before, so that what nobody fills is seen. Then
tensors are compared with what the step's state is known to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.checkpoint.restore import Checkpoint, newest_verified, verify
from holdfast.errors import HoldfastError
from holdfast.layout import Topology
from holdfast.spec.state import ITEM_BYTES, local_boxes
from holdfast.wire.runstore import FolderStore, RunStore
from tests.checkpoint.campaign import states
from tests.checkpoint.campaign.oracle import Expected, Position, expected
from tests.checkpoint.campaign.scenes import contents

MARK = 0xA5


class WrongError(AssertionError):
    """The product has failed: a restore that is silently wrong, older than it need be, or refused
    where something good is left; or a refusal that is no clear sentence."""


@dataclass(frozen=True)
class Restored:
    """position: None when nothing was restored, with `sentence`; or there was nothing at all."""

    position: Position | None
    sentence: str | None = None
    rejected: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.position is None:
            return "one sentence" if self.sentence else "nothing there"
        fell = f", {len(self.rejected)} passed over" if self.rejected else ""
        return f"step {self.position[0]}{fell}"


@dataclass
class Rejections:
    seen: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, key: str, reason: str) -> None:
        check_sentence(reason)
        self.seen.append((key, reason))


def restore(store: RunStore, topo: Topology) -> Restored:
    """Restore onto `topo`, and compare every tensor of every rank. Raises WrongError."""
    rejected = Rejections()
    try:
        checkpoint = newest_verified(store, rejected)
        if checkpoint is not None:
            compare(checkpoint, topo)
    except HoldfastError as error:
        return Restored(None, check_sentence(str(error)), tuple(key for key, _ in rejected.seen))
    keys = tuple(key for key, _ in rejected.seen)
    if checkpoint is None:
        return Restored(None, None, keys)
    return Restored((checkpoint.step, checkpoint.commit.generation), None, keys)


def compare(checkpoint: Checkpoint, topo: Topology) -> None:
    """Every box of every rank, bit by bit. Raises WrongError."""
    step = checkpoint.step
    names = {spec.name: spec for spec in checkpoint.tensors}
    if checkpoint.tensors != states.TABLE:
        raise WrongError(f"step {step}: the table is not the one that was written")
    if checkpoint.commit.meta != {"position": 16 * step}:
        raise WrongError(f"step {step}: meta is {dict(checkpoint.commit.meta)}")
    for rank in range(topo.world_size):
        for box in local_boxes(topo, states.TABLE, rank):
            if not box.size:
                continue
            out = bytearray([MARK]) * (box.size * ITEM_BYTES[names[box.name].dtype])
            checkpoint.read(box, memoryview(out))
            if bytes(out) != states.content(step, box):
                raise WrongError(f"SILENTLY WRONG: {box} on rank {rank} is not that of step {step}")


def check_sentence(text: str) -> str:
    """One sentence that a person can read. Raises WrongError."""
    if not text or "\n" in text or "Traceback" in text or len(text) > 400:
        raise WrongError(f"not one clear sentence: {text!r}")
    return text


def judge(found: Restored, due: Expected) -> None:
    """Raises WrongError unless what was restored is what had to be."""
    if found.position is not None:
        if found.position not in due.allowed:
            raise WrongError(f"restored {found}, one of {due.allowed} was there")
    elif due.must:
        raise WrongError(f"refused ({found.sentence}), though {due.allowed[-1]} is whole")
    elif due.candidates and found.sentence is None:
        raise WrongError("begins again from nothing without a word")


def judge_folder(
    folder: Path, written: Mapping[str, bytes], topo: Topology, *, seen: bool = True
) -> tuple[Restored, Expected]:
    """Restore from a folder and judge by its files; verify must see what is not whole."""
    due = expected(contents(folder), written)
    store = FolderStore(folder)
    found = restore(store, topo)
    judge(found, due)
    for key in due.broken if seen else ():
        try:
            problems = verify(store, key)
        except HoldfastError as error:
            problems = [str(error)]
        if not problems:
            raise WrongError(f"verify sees nothing wrong with {key}")
        for problem in problems:
            check_sentence(problem)
    return found, due
