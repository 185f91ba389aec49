"""The run folder monitor: an agent ends with a sentence if it stays without its run folder.

The folder is lost if the newest term that was seen in it is not in it any more. So it was moved,
removed, emptied, replaced, or its file system is not mounted. Training continues, nothing is saved,
and whatever is at the path is ignored. After `FOLDER_RETURN_TIMEOUT_S` this agent ends; each agent
judges by its own view, and the other nodes continue without it.

A disk that fails or does not answer says nothing about the folder: the agent waits without limit.
A node that is asked to leave waits no longer than its own time allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from holdfast.elastic.run_result import EndReason, RunEndedError
from holdfast.errors import HoldfastError, StoreError
from holdfast.wire.store.run_store import MissingKeyError, RunStore, append_interval
from holdfast.wire.term import read_newest_term_object

FOLDER_RETURN_TIMEOUT_S = 120.0
"""Seconds within which a lost folder may come back."""
FOLDER_CHECK_INTERVAL_S = 1.0
BUCKET_CHECK_INTERVAL_S = 5.0
"""The same for a bucket, where each check of each node is three requests."""
FIRST_CHECK_INTERVAL_S = 0.1
"""Seconds between two checks until a term is seen."""
LAST_NODE_FOLDER_WAIT_S = 120.0
"""Seconds that the last node, if asked to leave, waits for its folder. No other node holds the
state."""
DISK_REPLY_TIMEOUT_S = 60.0
"""Seconds without an answer from which a disk counts as hung; until then it may only be busy."""
FOLDER_LOST_MESSAGE = "the run folder has been moved, removed, replaced or unmounted"
FOLDER_GONE_MESSAGE = f"{FOLDER_LOST_MESSAGE}; put it back, or start another run"
FOLDER_UNREACHABLE_MESSAGE = "the run folder is out of reach"


class LostFolderError(StoreError):
    """The newest term that was seen in the run folder is not in it any more."""

    def __init__(self) -> None:
        super().__init__(FOLDER_LOST_MESSAGE)


class RunFolder:
    """The run folder as one agent knows it: by the newest term that it has seen there."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        is_bucket = append_interval(store) > 0
        self.check_interval_s = BUCKET_CHECK_INTERVAL_S if is_bucket else FOLDER_CHECK_INTERVAL_S
        self._newest_term: tuple[str, bytes] | None = None  # key and content

    @property
    def is_known(self) -> bool:
        """Return True if a term was seen. Until then, a lost folder cannot be noticed."""
        return self._newest_term is not None

    def check(self) -> None:
        """Raises LostFolderError if the folder is lost, and what the store raises if the disk
        fails. Call it in a thread: a slow disk may block it."""
        if self._newest_term is not None:
            key, content = self._newest_term
            try:
                if self._store.get(key) != content:
                    raise LostFolderError
            except MissingKeyError:
                raise LostFolderError from None
        self._newest_term = read_newest_term_object(self._store) or self._newest_term


class RunFolderMonitor:
    """The monitor of one agent's run folder. Lives in one event loop."""

    def __init__(
        self,
        run_folder: RunFolder,
        leave_reason: Callable[[], str],
        time_left_s: Callable[[], float],
        say: Callable[[str], None],
        describe_held: Callable[[], str] = lambda: "",
    ) -> None:
        """leave_reason: returns why this node must leave, "" if it stays. time_left_s: returns the
        seconds until then, 0 if not known. describe_held: returns which state this node holds."""
        self._describe_held = describe_held
        self._run_folder, self._say = run_folder, say
        self._leave_reason, self._time_left_s = leave_reason, time_left_s
        self._clock = asyncio.get_running_loop().time
        self._check_task: asyncio.Task[None] | None = None
        self._check_began_at = 0.0
        self._problem: HoldfastError | None = None  # what the last check found

    @property
    def is_folder_responsive(self) -> bool:
        """Return True if the last check found the folder and no check hangs. Otherwise any access
        to its disk may block for ever."""
        return self._problem is None and self._check_duration_s <= FOLDER_CHECK_INTERVAL_S

    async def require_folder(self) -> None:
        """Raises StoreError if the folder is lost or out of reach: what is at its path is not
        this run's."""
        try:
            await asyncio.to_thread(self._run_folder.check)
        except LostFolderError:
            raise
        except HoldfastError:
            raise StoreError(FOLDER_UNREACHABLE_MESSAGE) from None

    async def find_loss(self) -> RunEndedError | None:
        """Return an error if the folder is lost at the end of the run, and with it what was saved.
        A disk that does not answer says nothing."""
        if self.is_folder_responsive or isinstance(self._problem, LostFolderError):
            try:
                await asyncio.to_thread(self._run_folder.check)
            except HoldfastError as error:
                return self._end_error(True) if isinstance(error, LostFolderError) else None
        return None

    async def wait_for_end(self) -> RunEndedError:
        """Wait until the folder's state ends this node's part in the run; return the error.

        Cancel it if the node leaves before."""
        present_at, lost_since, leave_timeout_s = self._clock(), inf, inf
        while True:
            known = self._run_folder.is_known
            interval_s = self._run_folder.check_interval_s
            await asyncio.sleep(interval_s if known else FIRST_CHECK_INTERVAL_S)
            # Update what is known of the folder; a slow disk leaves it as it was.
            if self._check_task is None:
                self._check_began_at = self._clock()
                self._check_task = asyncio.create_task(asyncio.to_thread(self._run_folder.check))
            await asyncio.wait({self._check_task}, timeout=FOLDER_CHECK_INTERVAL_S)
            if self._check_task.done():
                error, self._check_task = self._check_task.exception(), None
                if error is not None and not isinstance(error, HoldfastError):
                    raise error
                self._problem = error
            elif self._check_duration_s > DISK_REPLY_TIMEOUT_S:
                self._problem = StoreError(FOLDER_UNREACHABLE_MESSAGE)
            now, is_lost = self._clock(), isinstance(self._problem, LostFolderError)
            if leave_timeout_s == inf and self._leave_reason():
                leave_timeout_s = max(1.0, self._time_left_s() or LAST_NODE_FOLDER_WAIT_S)
                present_at = now  # all of this time is for the folder
            if self._problem is None:
                present_at = now
            if is_lost and lost_since == inf:
                waits = f"{FOLDER_LOST_MESSAGE}; waiting {FOLDER_RETURN_TIMEOUT_S:g} s for it"
                held = self._describe_held()
                self._say(f"{waits}. {held}; nothing is saved until it is back" if held else waits)
            lost_since = min(now, lost_since) if is_lost else inf
            if now - lost_since >= FOLDER_RETURN_TIMEOUT_S or now - present_at >= leave_timeout_s:
                return self._end_error(is_lost)

    @property
    def _check_duration_s(self) -> float:
        return 0.0 if self._check_task is None else self._clock() - self._check_began_at

    def _end_error(self, is_lost: bool) -> RunEndedError:
        if is_lost:
            if held := self._describe_held():
                self._say(f"{held} in memory, and it is lost with this agent")
            return RunEndedError(FOLDER_GONE_MESSAGE, EndReason.FENCED)
        return RunEndedError(
            f"{self._leave_reason()}: {FOLDER_UNREACHABLE_MESSAGE}, so this node's state is not "
            "saved; run the same command again once it is back",
            EndReason.FENCED,
        )
