"""The order of gangs on hosts: programs that need several hosts at once. Pure.

A gang is a program that runs on several hosts together and waits inside for all of them, such as a
training run. If one host began gang 1 and another one gang 2, and both need both hosts, neither
would ever continue. So one controller decides one order (Pathways, Barham et al., MLSys 2022,
section 4.4):

    ready    A gang is queued once the gangs that it waits for are done. It holds nothing before.
    queued   The controller appends it to the queues of all of its hosts in one step. So any two
             gangs stand in the same order in every queue that has both.
    running  A host begins the first gang of its queue when the one before has ended there. It need
             not ask: its queue may hold gangs ahead.

The first queued gang of the common order is first in all of its queues, or behind gangs that are
done. So some gang can always continue. `tests/platform/test_gangs.py` checks every interleaving of
small cases, and that queues without a common order do get stuck.

A lost host ends the gangs that may have begun on it. The rest of its queue is queued again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

QUEUE_AHEAD = 2
"""Gangs that a host holds: the one that runs, and the next one, which then begins at once."""


class GangState(StrEnum):
    WAITING = "waiting"  # for other gangs, or for a place in the queues
    QUEUED = "queued"  # on its hosts; a host may have begun it
    DONE = "done"
    FAILED = "failed"


@dataclass
class Gang:
    """number: the order of submission. needs: hosts of each group. after: gangs that must be done.
    hosts: those that it is queued on, in rank order. ended: exit code by host. attempts: how often
    it may still be queued again after a host was lost."""

    number: int
    needs: Mapping[str, int]
    after: tuple[int, ...] = ()
    attempts: int = 0
    state: GangState = GangState.WAITING
    hosts: tuple[str, ...] = ()
    begun: set[str] = field(default_factory=set)
    ended: dict[str, int] = field(default_factory=dict)
    reason: str = ""


@dataclass
class Host:
    """queue: numbers of gangs, the first one runs or is about to."""

    name: str
    group: str
    queue: list[int] = field(default_factory=list)


class GangBoard:
    """All gangs and hosts of one controller."""

    def __init__(self, queue_ahead: int = QUEUE_AHEAD) -> None:
        self.gangs: dict[int, Gang] = {}
        self.hosts: dict[str, Host] = {}
        self._queue_ahead = queue_ahead

    def add_host(self, name: str, group: str) -> None:
        self.hosts[name] = Host(name, group)

    def submit(self, needs: Mapping[str, int], after: Sequence[int] = (), retries: int = 0) -> int:
        """Return the number of a new gang. Raises ValueError for one that waits for a gang that was
        not submitted before, or needs nothing."""
        unknown = [number for number in after if number not in self.gangs]
        if unknown or not needs or min(needs.values()) < 1:
            raise ValueError("a gang needs hosts, and waits for gangs that were submitted before")
        number = len(self.gangs)
        self.gangs[number] = Gang(number, dict(needs), tuple(after), retries)
        return number

    def advance(self) -> list[int]:
        """Queue what can be queued; return the gangs that were. A gang whose predecessor failed
        fails, too."""
        queued: list[int] = []
        for gang in self._waiting():
            states = [self.gangs[number].state for number in gang.after]
            if GangState.FAILED in states:
                failed = gang.after[states.index(GangState.FAILED)]
                self._fail(gang, f"gang {failed} failed, and this one waits for it")
            elif all(state is GangState.DONE for state in states) and self._place(gang):
                queued.append(gang.number)
        return queued

    def begin(self, host: str, number: int) -> None:
        """A host has begun a gang."""
        self.gangs[number].begun.add(host)

    def end(self, host: str, number: int, code: int) -> None:
        """A host's part of a gang has ended. The gang is done when all parts have; it fails with
        the first part that does."""
        gang = self.gangs[number]
        self._leave_queue(host, number)
        if gang.state is not GangState.QUEUED or host not in gang.hosts:
            return
        gang.ended[host] = code
        if code != 0:
            self._fail(gang, f"its program ended with exit code {code} on {host}")
        elif len(gang.ended) == len(gang.hosts):
            gang.state = GangState.DONE

    def lose_host(self, name: str) -> None:
        """A host does not answer any more. Gangs that it has begun fail, or are queued again if
        they may be tried again. Those that it has not begun are queued again. The first gang
        of its queue counts as begun: the host may have done so since its last report."""
        lost = self.hosts.pop(name)
        if lost.queue:
            self.gangs[lost.queue[0]].begun.add(name)
        for number in lost.queue:
            gang = self.gangs[number]
            if gang.state is not GangState.QUEUED:
                continue
            if gang.begun and gang.attempts == 0:
                self._fail(gang, f"{name} was lost")
                continue
            gang.attempts -= bool(gang.begun)
            # Take a gang out of all queues; it waits for a place again. Hosts that have
            # begun it keep it in their queue until they have ended it.
            for host in gang.hosts:
                if host not in gang.begun:
                    self._leave_queue(host, gang.number)
            gang.state, gang.hosts = GangState.WAITING, ()

    def cancel(self, number: int) -> None:
        """End a gang that is not done."""
        gang = self.gangs[number]
        if gang.state in (GangState.WAITING, GangState.QUEUED):
            self._fail(gang, "it was cancelled")

    def queue_of(self, host: str) -> tuple[int, ...]:
        """The gangs that a host is to run, in order. One that has failed is not among them: a host
        that runs it ends it."""
        return tuple(
            number
            for number in self.hosts[host].queue
            if self.gangs[number].state is GangState.QUEUED
        )

    # --- parts ------------------------------------------------------------------------------
    def _waiting(self) -> Iterator[Gang]:
        for gang in list(self.gangs.values()):
            if gang.state is GangState.WAITING:
                yield gang

    def _place(self, gang: Gang) -> bool:
        """Append the gang to the shortest queues of its groups, all at once, if they have room."""
        chosen: list[Host] = []
        for group, number in sorted(gang.needs.items()):
            room = [
                host
                for host in self.hosts.values()
                if host.group == group
                and len(host.queue) < self._queue_ahead
                and gang.number not in host.queue  # its part of an earlier attempt
            ]
            if len(room) < number:
                return False
            chosen += sorted(room, key=lambda host: (len(host.queue), host.name))[:number]
        for host in chosen:
            host.queue.append(gang.number)
        gang.hosts = tuple(host.name for host in chosen)
        gang.begun, gang.ended, gang.state = set(), {}, GangState.QUEUED
        return True

    def _leave_queue(self, host: str, number: int) -> None:
        found = self.hosts.get(host)
        if found is not None and number in found.queue:
            found.queue.remove(number)

    def _fail(self, gang: Gang, reason: str) -> None:
        for host in gang.hosts:
            if host not in gang.begun or host in gang.ended:
                self._leave_queue(host, gang.number)
        gang.state, gang.reason = GangState.FAILED, reason
