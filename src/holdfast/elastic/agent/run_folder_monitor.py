"""The run folder monitor: checks that the folder is the one that this agent began in.

    here   Its path leads to it, and the newest term in it is unchanged.
    away   Its state is not known: a link to itself, an unmounted file system, a failing disk.
    gone   It was moved, removed or emptied, or another folder is at its path.

If the folder is `away`, the agent waits without limit and training continues. If the folder is
`gone`, a user may put it back within `FOLDER_RETURN_TIMEOUT_S`. After that, this node leaves,
because it could save nothing any more. Each agent judges by its own view. If one machine alone has
lost the folder, the other nodes continue without it. A run of one node leaves at once.

While the folder is missing, ignore whatever is at its path. In particular, do not conclude that the
term has ended (`GuardedTerm`).

A node that is asked to leave waits for the folder no longer than its own time allows.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from holdfast.elastic.run_result import EndReason, RunEndedError
from holdfast.errors import FencedError, HoldfastError, RunFolderError
from holdfast.wire.store.run_store import MissingKeyError, RunStore, translate_os_error
from holdfast.wire.term import TERMS_PREFIX, Term, newest_number

FOLDER_RETURN_TIMEOUT_S = 30.0
"""Seconds within which a moved or removed folder may be put back."""
FOLDER_LOSS_LEAVE_TIMEOUT_S = 10.0
"""Seconds until a node that leaves for it is dropped, if the other nodes can continue."""
FOLDER_CHECK_INTERVAL_S = 1.0
LAST_NODE_FOLDER_WAIT_S = 120.0
"""Seconds that the last node, if asked to leave, waits for a folder that is `away`. No other node
holds the state."""
DISK_REPLY_TIMEOUT_S = 60.0
"""Seconds without an answer from which a disk counts as hung; until then it may only be busy."""
_FOLDER_LOST_MESSAGE = "the run folder has been moved, removed or replaced"
FOLDER_WAIT_MESSAGE = f"{_FOLDER_LOST_MESSAGE}; it is waited for, for {FOLDER_RETURN_TIMEOUT_S:g} s"
FOLDER_GONE_MESSAGE = f"{_FOLDER_LOST_MESSAGE}; put it back, or start another run"
FOLDER_UNREACHABLE_MESSAGE = "the run folder is out of reach"
_OWN_ENTRIES = {"logs"}
"""Entries that newly started child processes make at the path of a folder that is `away`."""


class FolderState(StrEnum):
    PRESENT = "here"
    UNREACHABLE = "away"
    GONE = "gone"


class RunFolder:
    """The run folder as it was when this object was made."""

    def __init__(self, folder: Path, store: RunStore) -> None:
        """Raises RunFolderError if the folder cannot be opened."""
        self._folder, self._store = folder, store
        # key and object of the newest term seen
        self._newest_term_object: tuple[str, bytes] | None = None
        flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._root_fd = os.open(folder, flags)  # while open, no other folder gets its inode
        except OSError as error:
            raise translate_os_error(error, folder) from error

    def close(self) -> None:
        os.close(self._root_fd)

    def read_state(self) -> FolderState:
        """Return the folder's state. Call it in a thread: a slow disk may block it."""
        found = self._read_state_once()
        # A file system that is mounted or unmounted during one check gives a mixed picture.
        return self._read_state_once() if found is FolderState.GONE else found

    def _read_state_once(self) -> FolderState:
        try:
            if not os.path.samestat(os.stat(self._folder), os.fstat(self._root_fd)):
                empty = set(os.listdir(self._folder)) <= _OWN_ENTRIES
                return (
                    FolderState.UNREACHABLE
                    if empty and not self._is_mounted()
                    else FolderState.GONE
                )
            return FolderState.PRESENT if self._has_same_term() else FolderState.GONE
        except (FileNotFoundError, NotADirectoryError):
            return FolderState.GONE if self._is_mounted() else FolderState.UNREACHABLE
        except (OSError, HoldfastError):
            return FolderState.UNREACHABLE

    def _has_same_term(self) -> bool:
        """Return True if the newest term is unchanged, so the folder was neither emptied nor used
        by another run."""
        if self._newest_term_object is not None:
            key, said = self._newest_term_object
            try:
                if self._store.get(key) != said:
                    return False
            except MissingKeyError:
                return False
        number = newest_number(self._store.list(TERMS_PREFIX), TERMS_PREFIX)
        key = f"{TERMS_PREFIX}{number:010d}.json"
        if number and (self._newest_term_object is None or self._newest_term_object[0] != key):
            self._newest_term_object = key, self._store.get(key)
        return True

    def _is_mounted(self) -> bool:
        """Return True if the folder's file system is still mounted, or if that is not known."""
        try:
            own = Path(f"/proc/self/fdinfo/{self._root_fd}").read_text()
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return True
        found = [line.split()[1] for line in own.splitlines() if line.startswith("mnt_id:")]
        return not found or found[0] in {line.split()[0] for line in mounts.splitlines()}


@dataclass(frozen=True)
class GuardedTerm(Term):
    """A term that ends only if its own run folder says so."""

    run_folder: RunFolder = field(repr=False)

    def check(self) -> None:
        """Raises FencedError if the term is over; RunFolderError if the folder is missing."""
        try:
            super().check()
        except FencedError as error:
            place = self.run_folder.read_state()
            if place is FolderState.UNREACHABLE:
                raise RunFolderError(FOLDER_UNREACHABLE_MESSAGE) from None
            if place is FolderState.GONE:
                raise RunFolderError(str(error)) from None
        else:
            return
        super().check()  # the folder may have come back since the first check


class RunFolderMonitor:
    """The monitor of one agent's run folder. Lives in one event loop."""

    def __init__(
        self,
        run_folder: RunFolder,
        leave_reason: Callable[[], str],
        time_left_s: Callable[[], float],
        leave_run: Callable[[float], None],
        say: Callable[[str], None],
        *,
        is_single_node: bool = False,
    ) -> None:
        """Make the monitor.

        Args:
            leave_reason: Returns why this node must leave, "" if it stays.
            time_left_s: Returns the seconds until then, 0 if not known.
            leave_run: Makes the run continue without this node, after the given seconds at the
            latest. is_single_node: The run has no other node.
        """
        self.is_leaving = False
        """True if this node leaves because its folder is lost."""
        self._run_folder, self._leave_reason, self._time_left_s = (
            run_folder,
            leave_reason,
            time_left_s,
        )
        self._leave_run, self._say, self._is_single_node = leave_run, say, is_single_node
        self._clock = asyncio.get_running_loop().time
        self._check_task: asyncio.Task[FolderState] | None = None
        self._check_began_at = 0.0  # when the check under way began
        self._folder_state = FolderState.PRESENT
        # when it was last here, or this node was asked to leave
        self._last_present_at = self._clock()
        self._gone_since: float | None = None  # since when
        # seconds that a node has after it is asked to leave
        self._leave_timeout_s: float | None = None

    @property
    def is_folder_responsive(self) -> bool:
        """Return True if the last check found the folder and no check hangs. Otherwise any access
        to its disk may block for ever."""
        hangs = (
            self._check_task is not None
            and self._clock() - self._check_began_at > FOLDER_CHECK_INTERVAL_S
        )
        return self._folder_state is FolderState.PRESENT and not hangs

    def guard_term(self, term: Term) -> Term:
        return GuardedTerm(term.store, term.number, term.address, term.content, self._run_folder)

    async def require_present(self) -> None:
        """Raises RunFolderError if it is not here: no process that opens it may start then."""
        if await asyncio.to_thread(self._run_folder.read_state) is not FolderState.PRESENT:
            raise RunFolderError(FOLDER_UNREACHABLE_MESSAGE)

    async def require_not_gone(self) -> None:
        """Raises RunFolderError if it is lost: content at its path is not this run's."""
        if await asyncio.to_thread(self._run_folder.read_state) is FolderState.GONE:
            raise RunFolderError(FOLDER_WAIT_MESSAGE)

    async def wait_for_end(self) -> RunEndedError:
        """Wait until the folder's state ends this node's part in the run; return the error.

        Cancel it if the node leaves before."""
        while True:
            await asyncio.sleep(FOLDER_CHECK_INTERVAL_S)
            await self._check_folder()
            if self._is_single_node and self._folder_state is FolderState.GONE:
                return RunEndedError(FOLDER_GONE_MESSAGE, EndReason.FENCED)
            now = self._clock()
            self._update(now)
            if (
                self._gone_since is not None
                and now - self._gone_since >= FOLDER_RETURN_TIMEOUT_S + FOLDER_LOSS_LEAVE_TIMEOUT_S
            ):
                return RunEndedError(FOLDER_GONE_MESSAGE, EndReason.FENCED)
            if (
                self._leave_timeout_s is not None
                and now - self._last_present_at >= self._leave_timeout_s
            ):
                return self._timeout_error()

    async def _check_folder(self) -> None:
        """Update the folder's state; a slow disk leaves the last state in force."""
        if self._check_task is None:
            self._check_began_at = self._clock()
            self._check_task = asyncio.create_task(asyncio.to_thread(self._run_folder.read_state))
        await asyncio.wait({self._check_task}, timeout=FOLDER_CHECK_INTERVAL_S)
        if self._check_task.done():
            self._folder_state, self._check_task = self._check_task.result(), None
        elif self._clock() - self._check_began_at > DISK_REPLY_TIMEOUT_S:
            self._folder_state = FolderState.UNREACHABLE

    def _update(self, now: float) -> None:
        if self._leave_timeout_s is None and self._leave_reason():
            self._leave_timeout_s = max(1.0, self._time_left_s() or LAST_NODE_FOLDER_WAIT_S)
            self._last_present_at = now
        if self.is_leaving:
            return
        if self._folder_state is FolderState.PRESENT:
            self._last_present_at = now
        if self._folder_state is not FolderState.GONE:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
            self._say(FOLDER_WAIT_MESSAGE)
        elif now - self._gone_since >= FOLDER_RETURN_TIMEOUT_S:
            self.is_leaving = True
            self._leave_run(FOLDER_LOSS_LEAVE_TIMEOUT_S)

    def _timeout_error(self) -> RunEndedError:
        if self._folder_state is FolderState.GONE:
            return RunEndedError(FOLDER_GONE_MESSAGE, EndReason.FENCED)
        why = f"{self._leave_reason()}: the run folder is out of reach"
        return RunEndedError(
            f"{why}, so this node's state is not saved; run the same command again once it is back",
            EndReason.FENCED,
        )
