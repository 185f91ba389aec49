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
from holdfast.core.json_parsing import parse_json
from holdfast.errors import CheckpointError, CorruptError, StoreError
from holdfast.wire.store.run_store import AlreadyExistsError, MissingKeyError, RunStore

LEASE_EXPIRY_S = 60.0
"""A claim that is watched and not renewed for so many seconds is taken over."""
LEASE_POLL_S = 1.0


class LeaseHeldError(CheckpointError):
    """Another process copies another checkpoint of this step there."""


@dataclass(frozen=True)
class LeaseContent:
    """Contents of a lease; one that is no JSON names just the copied checkpoint (version 1)."""

    brings: str
    by: str = "somebody"
    since: str = "some time ago"

    @staticmethod
    def parse(data: bytes) -> LeaseContent:
        try:
            value = parse_json(data)
            return LeaseContent(str(value["brings"]), str(value["by"]), str(value["since"]))
        except (ValueError, KeyError, TypeError):
            return LeaseContent(data.decode(errors="replace"))


class CopyLease:
    """One copy's claim. Its thread renews it; the thread that copies asks `check`, which touches
    no store (a bucket's client cannot be called from inside an upload)."""

    def __init__(
        self,
        target: RunStore,
        commit: Commit,
        content_digest: str,
        expiry_s: float = LEASE_EXPIRY_S,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._target, self._commit, self._expiry_s, self._say = target, commit, expiry_s, say
        self._prefix = f"{part_prefix(commit.generation, commit.step)}claim"
        since = datetime.now(UTC).isoformat(timespec="seconds")
        self._content = LeaseContent(
            content_digest, f"{platform.node()}, process {os.getpid()}", since
        )
        self._own_numbers: list[int] = []  # numbers that we made and did not remove, under `_turn`
        self._renewal_lock = threading.Lock()  # one renewal at a time
        self._change = threading.Condition()
        self._renewed_at = 0.0  # when the newest of ours was begun
        self._is_renewal_requested = self._is_closed = False
        self._lost_error: LeaseHeldError | None = None
        self._last_error: Exception | None = None

    # --- beginning and end ----------------------------------------------------------------------
    def acquire(self) -> None:
        """Take the claim. Raises LeaseHeldError when a live process copies another checkpoint."""
        watched, begun = -1, 0.0
        while True:
            newest, said = self._read_newest()
            if said is None or said.brings == self._content.brings:
                if self._create_next(newest + 1):
                    return
                continue
            if watched < 0:
                watched, begun = newest, time.monotonic()
                self._say(
                    f"{self._describe_other(said)}: waiting {self._expiry_s:g} s for a sign of life"
                )
            if newest != watched:
                raise LeaseHeldError(
                    self._describe_other(said), where="the target", remedy="name a new folder"
                )
            if time.monotonic() - begun < self._expiry_s:
                time.sleep(min(self._expiry_s / 60, LEASE_POLL_S))
            elif self._create_next(newest + 1):
                for number in self._list_numbers():
                    if number <= newest:
                        self._remove(number)
                return

    @contextmanager
    def keep_renewed(self) -> Iterator[CopyLease]:
        """Renewed by a thread of its own within."""
        thread = threading.Thread(target=self._renew_periodically, name="claim", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            with self._change:
                self._is_closed = True
                self._change.notify_all()
            thread.join()

    def release(self) -> None:
        """There is nothing left to claim: all claims of the step go."""
        for number in self._list_numbers():
            self._remove(number)

    # --- while it is held -----------------------------------------------------------------------
    def check(self) -> None:
        """Raises LeaseHeldError when another process has taken over, StoreError when the claim is
        old and cannot be renewed."""
        with self._change:
            if not self._is_settled():
                self._is_renewal_requested = True
                self._change.notify_all()
                self._change.wait_for(self._is_settled, self._expiry_s)
            if self._lost_error is not None:
                raise self._lost_error
            if not self._is_settled():
                raise StoreError(
                    f"the claim on {self._commit.key} cannot be renewed: "
                    f"{self._last_error or 'the store does not answer'}"
                )

    def renew(self) -> None:
        """Make the next claim. Raises LeaseHeldError when another process has taken over."""
        with self._renewal_lock:
            while True:
                mine = self._own_numbers[-1]
                newest, said = self._read_newest()
                if said is None and self._is_copy_complete():
                    return
                if (
                    said is None
                    or mine not in self._list_numbers()
                    or (newest != mine and said.brings != self._content.brings)
                ):
                    raise self._mark_lost(said)
                if not self._create_next(newest + 1):
                    continue
                if mine not in self._list_numbers():  # taken over, and perhaps ended, just before
                    self._remove(self._own_numbers.pop())
                    if self._is_copy_complete():
                        return
                    raise self._mark_lost(None)
                for number in self._own_numbers[:-2]:  # a listing that is under way sees one of two
                    self._remove(number)
                del self._own_numbers[:-2]
                return

    def _renew_periodically(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(
                    lambda: self._is_closed or self._is_renewal_requested, self._expiry_s / 6
                )
                if self._is_closed:
                    return
                asked = self._is_renewal_requested
            try:
                self.renew()
            except LeaseHeldError:
                return
            except Exception as error:  # tried again; `check` says so if it lasts
                with self._change:
                    self._last_error = error
                    if asked:
                        self._change.wait_for(lambda: self._is_closed, self._expiry_s / 60)

    def _is_settled(self) -> bool:
        return (
            self._lost_error is not None or time.monotonic() - self._renewed_at < self._expiry_s / 2
        )

    def _mark_lost(self, content: LeaseContent | None) -> LeaseHeldError:
        error = LeaseHeldError(
            self._describe_other(content)
            if content
            else "the claim of this copy was taken over there",
            where="the target",
            remedy="copy it again, or name a new folder",
        )
        with self._change:
            self._lost_error = error
            self._change.notify_all()
        return error

    # --- the objects ----------------------------------------------------------------------------
    def _create_next(self, number: int) -> bool:
        """Return True if the claim is ours and the newest."""
        begun = time.monotonic()
        try:
            self._target.create(self._key(number), json.dumps(vars(self._content)).encode())
        except AlreadyExistsError:
            return False
        if max(self._list_numbers(), default=-1) != number:  # another claim came meanwhile
            self._remove(number)
            return False
        self._own_numbers.append(number)
        self._record_renewal(begun)
        return True

    def _record_renewal(self, begun_at: float) -> None:
        with self._change:
            self._renewed_at, self._is_renewal_requested, self._last_error = begun_at, False, None
            self._change.notify_all()

    def _read_newest(self) -> tuple[int, LeaseContent | None]:
        """The number and words of the newest claim; (0, None) where there is none."""
        while numbers := self._list_numbers():
            with suppress(MissingKeyError):
                try:
                    return numbers[-1], LeaseContent.parse(self._target.get(self._key(numbers[-1])))
                except CorruptError as error:
                    return numbers[-1], LeaseContent(str(error))
        return 0, None

    def _list_numbers(self) -> list[int]:
        found = [key[len(self._prefix) :] for key in self._target.list(self._prefix)]
        return sorted(int(name[1:] or 0) for name in found if not name or name[1:].isdecimal())

    def _key(self, number: int) -> str:
        return f"{self._prefix}-{number:08d}" if number else self._prefix

    def _remove(self, number: int) -> None:
        self._target.delete(self._key(number))

    def _is_copy_complete(self) -> bool:
        """Return True if another copy of the very same checkpoint has ended."""
        begun = time.monotonic()
        try:
            stored = self._target.get(self._commit.key)
        except MissingKeyError:
            return False
        if xxh3_128_hexdigest(stored) != self._content.brings:
            return False
        self._record_renewal(begun)
        return True

    def _describe_other(self, content: LeaseContent) -> str:
        return (
            f"another checkpoint of step {self._commit.step}, generation "
            f"{self._commit.generation}, is being copied there (by {content.by}, since "
            f"{content.since})"
        )
