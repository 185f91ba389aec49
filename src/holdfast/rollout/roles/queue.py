"""The queue of completions, in the agent of the coordinator. No torch, no files.

It holds nothing that the run needs. If it is lost with its agent, trainers ask the next one again,
and actors hand in again what they have made. An entry ends when a later step is trained.

A lease ends when the result comes, or when the process that started the actor says that it exited.
It also ends LEASE_S seconds after the actor's last sign of life. Then another actor gets it. Two
actors may so generate the same completion. They make the same bits, and the first one counts.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from holdfast.rollout.roles.messages import (
    LEASE_S,
    Done,
    Made,
    Part,
    PolicyPart,
    RoleLost,
    RoleOrders,
    RoleReport,
    Scored,
    TrainerAsk,
    TrainerReply,
    Wanted,
)

MAX_ANSWER_TOKENS = 500_000
"""Tokens of the completions in one answer, which keep it below the limit of the client."""


@dataclass
class _Entry:
    """One completion on its way."""

    wanted: Wanted
    number: int  # in the order of asking
    actor: str = ""  # that has the lease to generate it
    begun: Part | None = None  # the longest beginning that an actor has handed in
    made: Made | None = None
    scorer: str = ""
    scored: Scored | None = None
    is_fetched: bool = False


@dataclass
class _Role:
    """An actor or a scorer."""

    role: str
    stands_in: bool
    seen_at: float
    leases: set[Wanted] = field(default_factory=set)


class RolloutQueue:
    """Lives in one event loop."""

    def __init__(
        self,
        say: Callable[[str], None],
        clock: Callable[[], float],
        on_lost: Callable[[RoleLost], None] = lambda lost: None,
    ) -> None:
        """say: prints a line. clock: seconds. on_lost: called with a role that has exited."""
        self._on_lost = on_lost
        self.name = secrets.token_hex(8)
        self.differing = 0  # completions that two processes made unlike; a bug or a broken machine
        self._say, self._clock = say, clock
        self._entries: dict[Wanted, _Entry] = {}
        self._roles: dict[str, _Role] = {}
        self._policies: dict[str, dict[tuple[int, str], PolicyPart]] = {}
        self._step = self._asked = 0
        self._failure = ""
        self._changed = asyncio.Event()

    # --- requests -------------------------------------------------------------------------------
    async def ask(self, _: int, asked: TrainerAsk) -> TrainerReply:
        """Take what a rank needs; answer once a part of it is ready, or after its wait."""
        self._forget_before(asked.step)
        for part in asked.policies:
            self._policies.setdefault(part.tag, {})[part.part, part.agent] = part
        fresh = [w for w in asked.wanted if w not in self._entries]
        for wanted in fresh:
            self._add(wanted)
        if fresh or asked.policies:
            self._notify()
        await self._wait(asked.wait, lambda: bool(self._ready(asked.wanted)) or bool(self._failure))
        ready = self._ready(asked.wanted)
        room, given = MAX_ANSWER_TOKENS, list[Scored]()
        for scored in ready:
            room -= len(scored.made.tokens)
            if given and room < 0:
                break
            given.append(scored)
        failure, self._failure = self._failure, ""
        return TrainerReply(tuple(given), self._count("actor"), self._count("scorer"), failure)

    async def work(self, _: int, report: RoleReport) -> RoleOrders:
        """Take what a role has done; answer with leases once there are some, or after its wait."""
        now = self._clock()
        role = self._roles.setdefault(report.name, _Role(report.role, report.stands_in, now))
        role.seen_at = now
        self._take(report)
        self._renew(report.name, role, set(report.busy))
        if report.has_free:
            found = self._find_work(report)
            if not found and report.wait:
                await self._wait(report.wait, lambda: bool(self._find_work(report)))
                found = self._find_work(report)
            if self._roles.get(report.name) is not role:  # it exited while its question was open
                return RoleOrders(self.name, self._oldest)
            role.seen_at = self._clock()
            return self._lease(report, role, found)
        return RoleOrders(self.name, self._oldest)

    async def lose(self, _: int, lost: RoleLost) -> Done:
        """End the leases of a role that has exited."""
        self._on_lost(lost)
        self._drop(lost.name)
        return Done()

    # --- parts ----------------------------------------------------------------------------------
    def _add(self, wanted: Wanted) -> _Entry:
        self._asked += 1
        entry = self._entries[wanted] = _Entry(wanted, self._asked)
        return entry

    def _take(self, report: RoleReport) -> None:
        """Take results, also of entries that were lost with another queue."""
        for made in report.made:
            entry = self._entry_for(made.wanted)
            if entry is None:
                continue
            entry.actor = ""
            if entry.made is None:
                entry.made, entry.begun = made, None
            elif entry.made != made:
                self._say_differing(made.wanted)
        for begun in report.begun:
            entry = self._entry_for(begun.wanted)
            if entry is None or entry.made is not None:
                continue
            if entry.begun is None or len(entry.begun.tokens) < len(begun.tokens):
                entry.begun = begun
        for scored in report.scored:
            entry = self._entry_for(scored.made.wanted)
            if entry is None:
                continue
            entry.scorer = ""
            entry.made = entry.made or scored.made
            entry.scored = entry.scored or scored
        self._failure = self._failure or report.failure
        if report.made or report.scored or report.failure:
            self._notify()

    def _entry_for(self, wanted: Wanted) -> _Entry | None:
        if wanted.step < self._oldest:
            return None
        return self._entries.get(wanted) or self._add(wanted)

    def _say_differing(self, wanted: Wanted) -> None:
        self.differing += 1
        if self.differing == 1:
            self._say(
                f"two processes generated prompt {wanted.prompt} sample {wanted.sample} of step "
                f"{wanted.step} unlike; the first one counts. Look for machines with other "
                "libraries, or a broken one: holdfast doctor RUN"
            )

    def _renew(self, name: str, role: _Role, busy: set[Wanted]) -> None:
        """End the leases that a role no longer works on, and note its new ones."""
        for wanted in role.leases - busy:
            self._release(name, wanted)
        role.leases = set()
        for wanted in busy:
            entry = self._entry_for(wanted)
            if entry is None:
                continue
            holder = entry.actor if role.role == "actor" else entry.scorer
            if holder in ("", name) and not self._is_done(entry, role.role):
                self._grant(entry, name, role)

    @staticmethod
    def _is_done(entry: _Entry, role: str) -> bool:
        return (entry.made if role == "actor" else entry.scored) is not None

    @staticmethod
    def _grant(entry: _Entry, name: str, role: _Role) -> None:
        role.leases.add(entry.wanted)
        if role.role == "actor":
            entry.actor = name
        else:
            entry.scorer = name

    def _release(self, name: str, wanted: Wanted) -> None:
        entry = self._entries.get(wanted)
        if entry is not None:
            entry.actor = "" if entry.actor == name else entry.actor
            entry.scorer = "" if entry.scorer == name else entry.scorer

    def _find_work(self, report: RoleReport) -> list[_Entry]:
        """Return what a role may take, the oldest step first."""
        self._drop_silent()
        found = [entry for entry in self._entries.values() if self._is_open(entry, report.role)]
        found.sort(key=lambda entry: (entry.wanted.step, entry.number))
        return found[: report.has_free]

    def _is_open(self, entry: _Entry, role: str) -> bool:
        if role == "scorer":
            return entry.made is not None and entry.scored is None and not entry.scorer
        return entry.made is None and not entry.actor and self._is_published(entry.wanted.tag)

    def _is_published(self, tag: str) -> bool:
        parts = self._policies.get(tag, {})
        wanted = next(iter(parts.values())).parts if parts else -1
        return len({part for part, _ in parts}) == wanted

    def _lease(self, report: RoleReport, role: _Role, found: Iterable[_Entry]) -> RoleOrders:
        entries = list(found)
        for entry in entries:
            self._grant(entry, report.name, role)
        if report.role == "scorer":
            made = tuple(entry.made for entry in entries if entry.made is not None)
            return RoleOrders(self.name, self._oldest, made=made)
        tags = {entry.wanted.tag for entry in entries}
        places = tuple(part for tag in sorted(tags) for part in self._policies[tag].values())
        wanted = tuple(entry.wanted for entry in entries)
        begun = tuple(entry.begun for entry in entries if entry.begun is not None)
        return RoleOrders(self.name, self._oldest, wanted, policies=places, begun=begun)

    def _ready(self, wanted: Iterable[Wanted]) -> list[Scored]:
        entries = (self._entries.get(one) for one in wanted)
        return [entry.scored for entry in entries if entry is not None and entry.scored is not None]

    @property
    def _oldest(self) -> int:
        """The oldest step that counts. One rank may be a step behind another."""
        return self._step - 1

    def _forget_before(self, step: int) -> None:
        """Drop what older steps were trained on. A step that is far behind the newest one is that
        of a generation which began from an older state."""
        if self._oldest <= step <= self._step:
            return
        self._step = step
        self._entries = {w: e for w, e in self._entries.items() if w.step >= self._oldest}
        needed = {wanted.tag for wanted in self._entries}
        known = (part.policy for parts in self._policies.values() for part in parts.values())
        newest = max(known, default=0)
        self._policies = {
            tag: parts
            for tag, parts in self._policies.items()
            if tag in needed or any(part.policy == newest for part in parts.values())
        }

    def _count(self, role: str) -> int:
        self._drop_silent()
        return sum(each.role == role and not each.stands_in for each in self._roles.values())

    def _drop_silent(self) -> None:
        now = self._clock()
        for name in [n for n, each in self._roles.items() if now - each.seen_at > LEASE_S]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        role = self._roles.pop(name, None)
        if role is None:
            return
        for wanted in role.leases:
            self._release(name, wanted)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, seconds: float, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done`, for so many seconds at most."""
        loop = asyncio.get_running_loop()
        until = loop.time() + min(seconds, LEASE_S / 2)
        while not is_done() and (left := until - loop.time()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                return
