"""The run folder monitor: checks that the folder is the one that this agent began in.

    here   Its path leads to it, and the newest term in it is unchanged.
    away   Its state is not known: a link to itself, an unmounted file system, a failing disk.
    gone   It was moved, removed or emptied, or another folder is at its path.

If the folder is `away`, the agent waits without limit and training continues. If the folder is
`gone`, a user may put it back within `GONE_SECONDS`. After that, this node leaves, because it could
save nothing any more. Each agent judges by its own view. If one machine alone has lost the folder,
the other nodes continue without it. A run of one node leaves at once.

While the folder is missing, ignore whatever is at its path. In particular, do not conclude that the
term has ended (`Kept`).

A node that is asked to leave waits for the folder no longer than its own time allows.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from holdfast.elastic.run_result import EndedError, Over
from holdfast.errors import FencedError, HoldfastError, RunFolderError
from holdfast.wire.store.run_store import MissingKeyError, RunStore, spoken_error
from holdfast.wire.term import TERMS, Term, newest_number

GONE_SECONDS = 30.0
"""Seconds within which a moved or removed folder may be put back."""
HOLD_SECONDS = 10.0
"""Seconds until a node that leaves for it is dropped, if the other nodes can continue."""
LOOK_SECONDS = 1.0
LAST_SECONDS = 120.0
"""Seconds that the last node, if asked to leave, waits for a folder that is `away`. No other node
holds the state."""
HUNG_SECONDS = 60.0
"""Seconds without an answer from which a disk counts as hung; until then it may only be busy."""
_MISSED = "the run folder has been moved, removed or replaced"
WAITED = f"{_MISSED}; it is waited for, for {GONE_SECONDS:g} s"
GONE = f"{_MISSED}; put it back, or start another run"
OUT_OF_REACH = "the run folder is out of reach"
_OURS = {"logs"}
"""Entries that newly started child processes make at the path of a folder that is `away`."""


class Place(StrEnum):
    HERE = "here"
    AWAY = "away"
    GONE = "gone"


class RunFolder:
    """The run folder as it was when this object was made."""

    def __init__(self, folder: Path, store: RunStore) -> None:
        """Raises RunFolderError if the folder cannot be opened."""
        self._folder, self._store = folder, store
        self._term: tuple[str, bytes] | None = None  # key and object of the newest term seen
        flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._root = os.open(folder, flags)  # while open, no other folder gets its inode
        except OSError as error:
            raise spoken_error(error, folder) from error

    def close(self) -> None:
        os.close(self._root)

    def look(self) -> Place:
        """Return the folder's state. Call it in a thread: a slow disk may block it."""
        found = self._glance()
        # A file system that is mounted or unmounted during one check gives a mixed picture.
        return self._glance() if found is Place.GONE else found

    def _glance(self) -> Place:
        try:
            if not os.path.samestat(os.stat(self._folder), os.fstat(self._root)):
                empty = set(os.listdir(self._folder)) <= _OURS
                return Place.AWAY if empty and not self._mounted() else Place.GONE
            return Place.HERE if self._same_term() else Place.GONE
        except (FileNotFoundError, NotADirectoryError):
            return Place.GONE if self._mounted() else Place.AWAY
        except (OSError, HoldfastError):
            return Place.AWAY

    def _same_term(self) -> bool:
        """Return True if the newest term is unchanged, so the folder was neither emptied nor used
        by another run."""
        if self._term is not None:
            key, said = self._term
            try:
                if self._store.get(key) != said:
                    return False
            except MissingKeyError:
                return False
        number = newest_number(self._store.list(TERMS), TERMS)
        key = f"{TERMS}{number:010d}.json"
        if number and (self._term is None or self._term[0] != key):
            self._term = key, self._store.get(key)
        return True

    def _mounted(self) -> bool:
        """Return True if the folder's file system is still mounted, or if that is not known."""
        try:
            own = Path(f"/proc/self/fdinfo/{self._root}").read_text()
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return True
        found = [line.split()[1] for line in own.splitlines() if line.startswith("mnt_id:")]
        return not found or found[0] in {line.split()[0] for line in mounts.splitlines()}


@dataclass(frozen=True)
class Kept(Term):
    """A term that ends only if its own run folder says so."""

    folder: RunFolder = field(repr=False)

    def check(self) -> None:
        """Raises FencedError if the term is over; RunFolderError if the folder is missing."""
        try:
            super().check()
        except FencedError as error:
            place = self.folder.look()
            if place is Place.AWAY:
                raise RunFolderError(OUT_OF_REACH) from None
            if place is Place.GONE:
                raise RunFolderError(str(error)) from None
        else:
            return
        super().check()  # the folder may have come back since the first check


class Losing:
    """The monitor of one agent's run folder. Lives in one event loop."""

    def __init__(
        self, folder: RunFolder, told: Callable[[], str], time_left: Callable[[], float],
        part: Callable[[float], None], say: Callable[[str], None], *, alone: bool = False,
    ) -> None:  # fmt: skip
        """Make the monitor.

        Args:
            told: Returns why this node must leave, "" if it stays.
            time_left: Returns the seconds until then, 0 if not known.
            part: Makes the run continue without this node, after the given seconds at the latest.
            alone: The run has no other node.
        """
        self.given_up = False
        """True if this node leaves because its folder is lost."""
        self._folder, self._told, self._time_left = folder, told, time_left
        self._part, self._say, self._alone = part, say, alone
        self._clock = asyncio.get_running_loop().time
        self._looking: asyncio.Task[Place] | None = None
        self._asked = 0.0  # when the check under way began
        self._place = Place.HERE
        self._here = self._clock()  # when it was last here, or this node was asked to leave
        self._gone: float | None = None  # since when
        self._due: float | None = None  # seconds that a node has after it is asked to leave

    @property
    def answers(self) -> bool:
        """Return True if the last check found the folder and no check hangs. Otherwise any access
        to its disk may block for ever."""
        hangs = self._looking is not None and self._clock() - self._asked > LOOK_SECONDS
        return self._place is Place.HERE and not hangs

    def kept(self, term: Term) -> Term:
        return Kept(term.store, term.number, term.address, term.held, self._folder)

    async def present(self) -> None:
        """Raises RunFolderError if it is not here: no process that opens it may start then."""
        if await asyncio.to_thread(self._folder.look) is not Place.HERE:
            raise RunFolderError(OUT_OF_REACH)

    async def check(self) -> None:
        """Raises RunFolderError if it is lost: content at its path is not this run's."""
        if await asyncio.to_thread(self._folder.look) is Place.GONE:
            raise RunFolderError(WAITED)

    async def end(self) -> EndedError:
        """Wait until the folder's state ends this node's part in the run; return the error.

        Cancel it if the node leaves before."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self._look()
            if self._alone and self._place is Place.GONE:
                return EndedError(GONE, Over.FENCED)
            now = self._clock()
            self._note(now)
            if self._gone is not None and now - self._gone >= GONE_SECONDS + HOLD_SECONDS:
                return EndedError(GONE, Over.FENCED)
            if self._due is not None and now - self._here >= self._due:
                return self._too_late()

    async def _look(self) -> None:
        """Update the folder's state; a slow disk leaves the last state in force."""
        if self._looking is None:
            self._asked = self._clock()
            self._looking = asyncio.create_task(asyncio.to_thread(self._folder.look))
        await asyncio.wait({self._looking}, timeout=LOOK_SECONDS)
        if self._looking.done():
            self._place, self._looking = self._looking.result(), None
        elif self._clock() - self._asked > HUNG_SECONDS:
            self._place = Place.AWAY

    def _note(self, now: float) -> None:
        if self._due is None and self._told():
            self._due = max(1.0, self._time_left() or LAST_SECONDS)
            self._here = now
        if self.given_up:
            return
        if self._place is Place.HERE:
            self._here = now
        if self._place is not Place.GONE:
            self._gone = None
        elif self._gone is None:
            self._gone = now
            self._say(WAITED)
        elif now - self._gone >= GONE_SECONDS:
            self.given_up = True
            self._part(HOLD_SECONDS)

    def _too_late(self) -> EndedError:
        if self._place is Place.GONE:
            return EndedError(GONE, Over.FENCED)
        why = f"{self._told()}: the run folder is out of reach, so this node's state is not saved"
        return EndedError(f"{why}; run the same command again once it is back", Over.FENCED)
