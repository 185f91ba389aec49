"""Whether the run folder is still the one that this agent began in, and how long it is waited for.

    here   its path leads to it, and the newest term is in it as it was
    away   nobody can tell: a link to itself, a file system that is not mounted, a disk that refuses
    gone   it was moved, removed or emptied, or another one lies at its path

One that is away is waited for however long that takes: training goes on. One that is gone may be
put back within `GONE_SECONDS`; then this node leaves, since nothing that it does could be saved any
more. Each agent goes by what it sees itself: where its machine alone has lost the folder, the
others go on without it. A run of one node leaves at once.

What lies at the path meanwhile says nothing of the run, least of all that a term is over (`Kept`).

A node that was told to go does not wait for a folder beyond its time, be it away or gone.
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
"""Within which a folder that is gone may be put back."""
HOLD_SECONDS = 10.0
"""Within which a node that leaves for it is done without, where others can go on."""
LOOK_SECONDS = 1.0
LAST_SECONDS = 120.0
"""How long the last node, which was told to go, waits for a folder that is away: nobody else holds
the state."""
HUNG_SECONDS = 60.0
"""A disk that says nothing for so long does not answer; until then it may only be busy."""
_MISSED = "the run folder has been moved, removed or replaced"
WAITED = f"{_MISSED}; it is waited for, for {GONE_SECONDS:g} s"
GONE = f"{_MISSED}; put it back, or start another run"
OUT_OF_REACH = "the run folder is out of reach"
_OURS = {"logs"}
"""What children that are started meanwhile make at the path of a folder that is away."""


class Place(StrEnum):
    HERE = "here"
    AWAY = "away"
    GONE = "gone"


class RunFolder:
    """A run folder as it was when this was made."""

    def __init__(self, folder: Path, store: RunStore) -> None:
        """Raises RunFolderError where it cannot be opened."""
        self._folder, self._store = folder, store
        self._term: tuple[str, bytes] | None = None  # the newest that was seen: its object
        flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._root = os.open(folder, flags)  # as long as it is open, no other has its inode
        except OSError as error:
            raise spoken_error(error, folder) from error

    def close(self) -> None:
        os.close(self._root)

    def look(self) -> Place:
        """For a thread of its own: a disk may keep it waiting."""
        found = self._glance()
        # A file system that comes or goes within a glance leaves a folder that never was.
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
        """A folder that was emptied is no run folder any more, nor is one in which another run has
        begun since."""
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
        """Whether the file system that it lay on can still be had; where that is not told, yes."""
        try:
            own = Path(f"/proc/self/fdinfo/{self._root}").read_text()
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return True
        found = [line.split()[1] for line in own.splitlines() if line.startswith("mnt_id:")]
        return not found or found[0] in {line.split()[0] for line in mounts.splitlines()}


@dataclass(frozen=True)
class Kept(Term):
    """A term of which its own run folder alone says that it is over."""

    folder: RunFolder = field(repr=False)

    def check(self) -> None:
        """Raises FencedError as any does; RunFolderError where the folder is away or gone."""
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
        super().check()  # it may have been away then, and is here by now


class Losing:
    """What follows for an agent. Lives in one event loop."""

    def __init__(
        self, folder: RunFolder, told: Callable[[], str], time_left: Callable[[], float],
        part: Callable[[float], None], say: Callable[[str], None], *, alone: bool = False,
    ) -> None:  # fmt: skip
        """told: why this node is to go, "" as long as it is not; time_left: within how many
        seconds, 0 where nobody said so. part: asks the others to go on without it, within so many
        seconds. alone: the run has no other node."""
        self.given_up = False
        """Whether this node leaves because its folder is gone."""
        self._folder, self._told, self._time_left = folder, told, time_left
        self._part, self._say, self._alone = part, say, alone
        self._clock = asyncio.get_running_loop().time
        self._looking: asyncio.Task[Place] | None = None
        self._asked = 0.0  # when the look began that is under way
        self._place = Place.HERE
        self._here = self._clock()  # when it was last here, or this node was told to go
        self._gone: float | None = None  # since when
        self._due: float | None = None  # seconds for a node that was told to go

    @property
    def answers(self) -> bool:
        """Whether the folder was here when it was looked at last, and no look takes long: else
        whatever else asks its disk may wait for ever."""
        hangs = self._looking is not None and self._clock() - self._asked > LOOK_SECONDS
        return self._place is Place.HERE and not hangs

    def kept(self, term: Term) -> Term:
        return Kept(term.store, term.number, term.address, term.held, self._folder)

    async def present(self) -> None:
        """Raises RunFolderError where it is not here: nothing that opens it may be started."""
        if await asyncio.to_thread(self._folder.look) is not Place.HERE:
            raise RunFolderError(OUT_OF_REACH)

    async def check(self) -> None:
        """Raises RunFolderError where it is gone: what its path says is not this run's."""
        if await asyncio.to_thread(self._folder.look) is Place.GONE:
            raise RunFolderError(WAITED)

    async def end(self) -> EndedError:
        """Until this node is to end, whatever else it waits for: why. To be cancelled where it ends
        before."""
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
        """What was seen last counts, as long as the disk is only slow."""
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
        why = f"{self._told()}: the run folder is out of reach, so what is held here is not saved"
        return EndedError(f"{why}; run the same command again once it is back", Over.FENCED)
