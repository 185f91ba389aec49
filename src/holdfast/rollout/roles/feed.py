"""The trainers' side: groups of completions for the steps of one rank.

A feed asks the queue and waits, in the thread of the loader. It can be interrupted at any time. It
decides nothing that depends on arrival. Which groups a step needs follows from the run file. A
group without variance is drawn again under numbers of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.config.sections.rollout import RolloutConfig
from holdfast.core.data.group_order import Group, policy_of
from holdfast.errors import PeerLostError, RewardError
from holdfast.rollout.messages import ScoredCompletion
from holdfast.rollout.roles.client import NoQueueError, QueueClient
from holdfast.rollout.roles.messages import LEASE_S, PolicyPart, TrainerAsk, TrainerReply, Wanted

ASK_WAIT_S = 1.0
"""Seconds for which a question stays open."""
RETRY_S = 0.2
PATIENCE_S = 2 * LEASE_S
"""Seconds without an actor after which the trainers generate, if there should be one."""
START_PATIENCE_S = 30.0
"""The same before the first one was heard: it imports torch."""


class StandIn(Protocol):
    """Does an actor's or a scorer's work in this process."""

    def turn(self, wait: float) -> None: ...
    def interrupt(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class DrawnGroup:
    """All completions of one prompt that a step trains on, or none if they are filtered."""

    epoch: int
    prompt: int
    policy: int
    draws: int  # how often it was drawn
    is_filtered: bool  # the last draw had no variance either, so it counts for nothing
    completions: tuple[ScoredCompletion, ...]  # of the last draw


@dataclass
class _Open:
    """A group that is not complete."""

    step: int
    group: Group
    draw: int = 0  # from 0
    found: dict[Wanted, ScoredCompletion] = field(default_factory=dict)


@dataclass(frozen=True)
class FeedLink:
    """How a feed reaches the world."""

    rank: int
    client: QueueClient
    policies: Callable[[], tuple[PolicyPart, ...]]  # that this rank has published
    tag_of: Callable[[int], str]  # of a policy
    reward_of: Callable[[Sequence[float]], float]  # of the numbers of `rollout.rewards`
    open_actor: Callable[[], StandIn]
    open_scorer: Callable[[], StandIn]
    on_lack: Callable[[int, str], None]  # (step, role): said once when a role has to be replaced


class CompletionFeed:
    """Groups for the steps of one rank. Belongs to the loader's thread, but for `interrupt`."""

    def __init__(self, config: RolloutConfig, link: FeedLink) -> None:
        self._config, self._link = config, link
        self.trained_step = 0
        """The step that the training thread computes: nothing older is needed."""
        self._drawn: dict[tuple[int, Group], DrawnGroup] = {}
        self._open: dict[tuple[int, Group], _Open] = {}
        self._stand_ins: dict[str, StandIn] = {}
        self._lacks_since: dict[str, float] = {}
        self._were_there: set[str] = set()  # roles that have been heard
        self._is_interrupted = False

    def groups(self, step: int, asked: Sequence[Group], ahead: Iterable[tuple[int, Group]]) -> None:
        """Wait until all groups of a step are drawn.

        Args:
            ahead: further groups (with their steps) that may be made meanwhile.

        Raises PeerLostError if it is interrupted, RewardError for a completion that has no reward.
        """
        wanted = [(step, group) for group in asked]
        for place in (*wanted, *ahead):
            if place not in self._drawn and place not in self._open:
                self._open[place] = _Open(*place)
        while not all(place in self._drawn for place in wanted):
            if self._is_interrupted:
                raise PeerLostError(f"step {step} waited for completions, and its generation ends")
            self._ask()

    def drawn(self, step: int, group: Group) -> DrawnGroup:
        """Return a group that `groups` has waited for."""
        return self._drawn[step, group]

    def forget_before(self, step: int) -> None:
        """Drop the groups of older steps."""
        self._drawn = {place: g for place, g in self._drawn.items() if place[0] >= step}
        self._open = {place: g for place, g in self._open.items() if place[0] >= step}

    def interrupt(self) -> None:
        """End a wait. Called by another thread."""
        self._is_interrupted = True
        self._link.client.interrupt()
        for stand_in in tuple(self._stand_ins.values()):
            stand_in.interrupt()

    def close(self) -> None:
        for stand_in in self._stand_ins.values():
            stand_in.close()
        self._stand_ins = {}

    # --- parts ----------------------------------------------------------------------------------
    def _wanted(self, one: _Open) -> list[Wanted]:
        """What is missing of an open group."""
        epoch, prompt = one.group
        policy = policy_of(one.step, self._config.lag)
        tag, first = self._link.tag_of(policy), one.draw * self._config.samples
        numbers = range(first, first + self._config.samples)
        made = (Wanted(one.step, tag, policy, epoch, prompt, number) for number in numbers)
        return [wanted for wanted in made if wanted not in one.found]

    def _ask(self) -> None:
        places = {w: one for one in self._open.values() for w in self._wanted(one)}
        wait = 0.0 if self._stand_ins else ASK_WAIT_S
        asked = TrainerAsk(
            self._link.rank, self.trained_step, tuple(places), self._link.policies(), wait
        )
        try:
            reply = self._link.client.ask(asked)
        except NoQueueError:
            time.sleep(RETRY_S)
            return
        if reply.failure:
            raise RewardError(reply.failure)
        for scored in reply.scored:
            if (one := places.get(scored.made.wanted)) is not None:
                one.found[scored.made.wanted] = scored.scored_completion
        for one in {id(one): one for one in places.values()}.values():
            self._settle(one)
        if any(not self._is_drawn(one) for one in self._open.values()):
            self._replace_roles(reply)

    def _is_drawn(self, one: _Open) -> bool:
        return (one.step, one.group) in self._drawn

    def _settle(self, one: _Open) -> None:
        """Take a group that is complete, or draw it again."""
        if self._wanted(one):
            return
        ordered = sorted(one.found.items(), key=lambda item: item[0].sample)
        completions = tuple(completion for _, completion in ordered)
        rewards = {self._link.reward_of(completion.rewards) for completion in completions}
        is_flat = self._config.filter != "none" and len(rewards) == 1
        if is_flat and one.draw + 1 < self._config.draws:
            one.draw, one.found = one.draw + 1, {}
            return
        policy = policy_of(one.step, self._config.lag)
        drawn = DrawnGroup(*one.group, policy, one.draw + 1, is_flat, completions)
        self._drawn[one.step, one.group] = drawn
        del self._open[one.step, one.group]

    def _replace_roles(self, reply: TrainerReply) -> None:
        """Do the work of a role that is missing, until it is there again."""
        counts = {"actor": reply.actors, "scorer": reply.scorers}
        asked_for = {"actor": self._config.actors, "scorer": self._config.scorers}
        now = time.monotonic()
        for role, count in counts.items():
            own = self._stand_ins.get(role)
            if count:
                self._were_there.add(role)
                self._lacks_since.pop(role, None)
                if own is not None:
                    self._stand_ins.pop(role).close()
                continue
            since = self._lacks_since.setdefault(role, now)
            patience = PATIENCE_S if role in self._were_there else START_PATIENCE_S
            if own is None and now - since >= (patience if asked_for[role] else 0.0):
                opened = self._link.open_actor if role == "actor" else self._link.open_scorer
                own = self._stand_ins[role] = opened()
                if asked_for[role]:
                    self._link.on_lack(self.trained_step, role)
            if own is not None:
                own.turn(0.0)
