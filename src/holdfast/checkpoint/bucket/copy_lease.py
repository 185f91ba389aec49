"""A lease on copying one checkpoint of a step into a store; it expires with its holder.

Two copies of different checkpoints of one step to one place would mix their blobs. (A machine that
was cut off may start such a copy.) So each copier first claims the step. Claims are numbered
objects, of which the newest counts. A claim names the checkpoint, the copier and the time (for
people: no two clocks are compared):

    parts/<generation>/<step>-claim-<number>

The holder creates the next number again and again, and removes its last but one. A copier of
another checkpoint watches the newest claim by its own clock. A newer claim is a sign of life, and
the copier is refused. After ABANDONED_SECONDS without one, it creates the next number itself. So
heartbeat and takeover are the same create-if-absent, and exactly one contender wins. A copier of
the same checkpoint continues at once: it may be a killed copy that runs again. So two copies of one
checkpoint may run side by side, each with a claim of the same content. The claim does not exclude
them: neither may remove an object that the other wrote intact (`copy.py`).

A suspended holder trusts its claim for half of that time only, then checks it (`check`). The commit
object, and the removal of a broken object, need a claim made just before (`renew`). A holder
suspended between that renewal and the commit could commit blobs that another checkpoint has
overwritten. Restore rejects such a commit by its checksums.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from xxhash import xxh3_128_hexdigest

from holdfast.core.format.manifest import Commit, part_prefix
from holdfast.core.json_parsing import parsed
from holdfast.errors import CheckpointError, CorruptError, StoreError
from holdfast.wire.store.run_store import AlreadyExistsError, MissingKeyError, RunStore

ABANDONED_SECONDS = 60.0
"""A claim that is watched and not renewed for so many seconds is taken over."""
POLL_SECONDS = 1.0


class ClaimedError(CheckpointError):
    """Another process copies another checkpoint of this step there."""


@dataclass(frozen=True)
class _Said:
    """Contents of a lease; one that is no JSON names just the copied checkpoint (version 1)."""

    brings: str
    by: str = "somebody"
    since: str = "some time ago"

    @staticmethod
    def of(data: bytes) -> _Said:
        try:
            value = parsed(data)
            return _Said(str(value["brings"]), str(value["by"]), str(value["since"]))
        except (ValueError, KeyError, TypeError):
            return _Said(data.decode(errors="replace"))


class Claim:
    """One copy's claim. Its thread renews it; the thread that copies asks `check`, which touches
    no store (a bucket's client cannot be called from inside an upload)."""

    def __init__(
        self, target: RunStore, commit: Commit, brings: str, abandoned: float = ABANDONED_SECONDS,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self._target, self._commit, self._abandoned, self._say = target, commit, abandoned, say
        self._prefix = f"{part_prefix(commit.generation, commit.step)}claim"
        since = datetime.now(UTC).isoformat(timespec="seconds")
        self._said = _Said(brings, f"{platform.node()}, process {os.getpid()}", since)
        self._own: list[int] = []  # numbers that we made and did not remove, under `_turn`
        self._turn = threading.Lock()  # one renewal at a time
        self._change = threading.Condition()
        self._made = 0.0  # when the newest of ours was begun
        self._asked = self._closed = False
        self._lost: ClaimedError | None = None
        self._trouble: Exception | None = None

    # --- beginning and end ----------------------------------------------------------------------
    def take(self) -> None:
        """Take the claim. Raises ClaimedError when a live process copies another checkpoint."""
        watched, begun = -1, 0.0
        while True:
            newest, said = self._newest()
            if said is None or said.brings == self._said.brings:
                if self._create(newest + 1):
                    return
                continue
            if watched < 0:
                watched, begun = newest, time.monotonic()
                self._say(f"{self._other(said)}: waiting {self._abandoned:g} s for a sign of life")
            if newest != watched:
                raise ClaimedError(
                    self._other(said), where="the target", remedy="name a new folder"
                )
            if time.monotonic() - begun < self._abandoned:
                time.sleep(min(self._abandoned / 60, POLL_SECONDS))
            elif self._create(newest + 1):
                for number in self._numbers():
                    if number <= newest:
                        self._remove(number)
                return

    @contextmanager
    def held(self) -> Iterator[Claim]:
        """Renewed by a thread of its own within."""
        thread = threading.Thread(target=self._work, name="claim", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            with self._change:
                self._closed = True
                self._change.notify_all()
            thread.join()

    def drop(self) -> None:
        """There is nothing left to claim: all claims of the step go."""
        for number in self._numbers():
            self._remove(number)

    # --- while it is held -----------------------------------------------------------------------
    def check(self) -> None:
        """Raises ClaimedError when another process has taken over, StoreError when the claim is old
        and cannot be renewed."""
        with self._change:
            if not self._settled():
                self._asked = True
                self._change.notify_all()
                self._change.wait_for(self._settled, self._abandoned)
            if self._lost is not None:
                raise self._lost
            if not self._settled():
                raise StoreError(f"the claim on {self._commit.key} cannot be renewed: "
                                 f"{self._trouble or 'the store does not answer'}")  # fmt: skip

    def renew(self) -> None:
        """Make the next claim. Raises ClaimedError when another process has taken over."""
        with self._turn:
            while True:
                mine = self._own[-1]
                newest, said = self._newest()
                if said is None and self._arrived():
                    return
                if said is None or mine not in self._numbers() or (
                    newest != mine and said.brings != self._said.brings
                ):  # fmt: skip
                    raise self._gone(said)
                if not self._create(newest + 1):
                    continue
                if mine not in self._numbers():  # taken over, and perhaps ended, just before
                    self._remove(self._own.pop())
                    if self._arrived():
                        return
                    raise self._gone(None)
                for number in self._own[:-2]:  # a listing that is under way sees one of two
                    self._remove(number)
                del self._own[:-2]
                return

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or self._asked, self._abandoned / 6)
                if self._closed:
                    return
                asked = self._asked
            try:
                self.renew()
            except ClaimedError:
                return
            except Exception as error:  # tried again; `check` says so if it lasts
                with self._change:
                    self._trouble = error
                    if asked:
                        self._change.wait_for(lambda: self._closed, self._abandoned / 60)

    def _settled(self) -> bool:
        return self._lost is not None or time.monotonic() - self._made < self._abandoned / 2

    def _gone(self, said: _Said | None) -> ClaimedError:
        error = ClaimedError(
            self._other(said) if said else "the claim of this copy was taken over there",
            where="the target", remedy="copy it again, or name a new folder",
        )  # fmt: skip
        with self._change:
            self._lost = error
            self._change.notify_all()
        return error

    # --- the objects ----------------------------------------------------------------------------
    def _create(self, number: int) -> bool:
        """Return True if the claim is ours and the newest."""
        begun = time.monotonic()
        try:
            self._target.create(self._key(number), json.dumps(vars(self._said)).encode())
        except AlreadyExistsError:
            return False
        if max(self._numbers(), default=-1) != number:  # another claim came meanwhile
            self._remove(number)
            return False
        self._own.append(number)
        self._renewed(begun)
        return True

    def _renewed(self, begun: float) -> None:
        with self._change:
            self._made, self._asked, self._trouble = begun, False, None
            self._change.notify_all()

    def _newest(self) -> tuple[int, _Said | None]:
        """The number and words of the newest claim; (0, None) where there is none."""
        while numbers := self._numbers():
            with suppress(MissingKeyError):
                try:
                    return numbers[-1], _Said.of(self._target.get(self._key(numbers[-1])))
                except CorruptError as error:
                    return numbers[-1], _Said(str(error))
        return 0, None

    def _numbers(self) -> list[int]:
        found = [key[len(self._prefix) :] for key in self._target.list(self._prefix)]
        return sorted(int(name[1:] or 0) for name in found if not name or name[1:].isdecimal())

    def _key(self, number: int) -> str:
        return f"{self._prefix}-{number:08d}" if number else self._prefix

    def _remove(self, number: int) -> None:
        self._target.delete(self._key(number))

    def _arrived(self) -> bool:
        """Return True if another copy of the very same checkpoint has ended."""
        begun = time.monotonic()
        try:
            stored = self._target.get(self._commit.key)
        except MissingKeyError:
            return False
        if xxh3_128_hexdigest(stored) != self._said.brings:
            return False
        self._renewed(begun)
        return True

    def _other(self, said: _Said) -> str:
        return (
            f"another checkpoint of step {self._commit.step}, generation "
            f"{self._commit.generation}, is being copied there (by {said.by}, since {said.since})"
        )
