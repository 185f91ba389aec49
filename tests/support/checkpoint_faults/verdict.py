"""Restoring after a fault, and the verdict.

This is the real path: every rank of some other layout reads its boxes of the newest trustworthy
checkpoint. Buffers are marked before, so that unfilled bytes show. Then tensors are compared with
the known state of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.restore_point import RestorePointFinder
from holdfast.checkpoint.restore.verify import find_newest_verified, verify
from holdfast.core.format.manifest import Commit
from holdfast.core.sharding.state_table import ITEM_BYTES, local_boxes
from holdfast.errors import CorruptError, HoldfastError, RunFolderError, StoreError
from holdfast.layout import Topology
from holdfast.wire.store.run_store import FolderStore, MissingKeyError, RunStore
from tests.support.checkpoint_faults import states
from tests.support.checkpoint_faults.histories import contents
from tests.support.checkpoint_faults.oracle import Expected, Position, expected

MARK = 0xA5
PRESENT = 99
"""The generation that restores; it is newer than whatever a case has opened."""


class WrongError(AssertionError):
    """The product has failed. The restore is silently wrong, older than necessary, or refused
    though a good checkpoint is left. Or the refusal is no clear sentence."""


@dataclass(frozen=True)
class Restored:
    """position: None when nothing was restored, with `sentence`; or there was nothing at all.
    newest: the newest step there was before the fault."""

    position: Position | None
    sentence: str | None = None
    rejected: tuple[str, ...] = ()
    newest: int = 8

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
    """Restore as a run does. Choose, and read every box of every rank of `topo` in one pass,
    checking as it streams. The next choice names what is corrupt. Every tensor is compared. Raises
    WrongError."""
    rejected = Rejections()
    tried: dict[str, str] = {}
    keys = lambda: tuple(dict.fromkeys([*tried, *(key for key, _ in rejected.seen)]))  # noqa: E731
    try:
        while True:
            chooser = RestorePointFinder(store, (), PRESENT, "config", "data", rejected)
            choice = chooser.find_newest(tried)
            if choice is None:
                return Restored(None, None, keys())
            problem = _read(store, choice.commit, topo)
            if problem is not None:
                tried[choice.key] = check_sentence(problem)
                continue
            return Restored((choice.commit.step, choice.commit.generation), None, keys())
    except HoldfastError as error:
        return Restored(None, check_sentence(str(error)), keys())


def _read(store: RunStore, commit: Commit, topo: Topology) -> str | None:
    """Read as `elastic/worker/restore.py` does; return what is corrupt. A store that fails is asked
    once more."""
    for again in (False, True):
        try:
            compare(Checkpoint(store, commit), topo)
            return None
        except (CorruptError, MissingKeyError) as error:
            return str(error)
        except (RunFolderError, StoreError) as error:
            if again:
                list_commits(store)  # raises when it is out of reach
                return f"it cannot be read: {error}"
    return None


def restore_verified(store: RunStore, topo: Topology) -> Restored:
    """As the commands restore that read a run from outside: every byte is verified first."""
    rejected = Rejections()
    try:
        checkpoint = find_newest_verified(store, rejected)
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
        wanted = [
            (box, memoryview(bytearray([MARK]) * (box.size * ITEM_BYTES[names[box.name].dtype])))
            for box in local_boxes(topo, states.TABLE, rank)
        ]
        checkpoint.read_all(wanted, threads=1 + rank % 2)
        for box, out in wanted:
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


def check_not_lost(found: Restored, said: Collection[int], what: str) -> None:
    """Raises WrongError unless the newest step that was reported as committed, or a newer one, is
    restored."""
    last = max(said, default=8)
    if found.position is None or found.position[0] < last:
        raise WrongError(f"{what}: step {last} was committed, {found} is restored")


def judge_folder(
    folder: Path, written: Mapping[str, bytes], topo: Topology, *, seen: bool = True
) -> tuple[Restored, Expected]:
    """Restore from a folder and judge by its files; verify must see what is damaged."""
    due = expected(contents(folder), written)
    store = FolderStore(folder)
    found = restore(store, topo)
    judge(found, due)
    judge(restore_verified(store, topo), due)
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
