"""Microbatches dealt to replicas that are not equally fast."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator

_ROUNDS = 40


def dealt(group: ReplicaChoice, number: int, each: int, more: int) -> Iterator[ReplicaChoice]:
    """Replicas that share out microbatches: `more` of them have one more than `each`."""
    if more:
        yield replace(group, dp_replicate=more, microbatches=each + 1)
    if number > more:
        yield replace(group, dp_replicate=number - more, microbatches=each)


def with_best_shares(evaluator: Evaluator, choice: Choice, total: int) -> Choice | None:
    """Return the layout with the shares that make its step shortest. Return None if a group cannot
    have enough microbatches to run its schedule.

    A limit gives each group the microbatches that its replicas finish within it. The limit is made
    shorter until the groups together do not finish all.
    """
    groups = [_Group(evaluator, choice, group) for group in choice.replicas]
    if sum(group.count * group.least for group in groups) > total:
        return None
    each = -(-total // sum(group.count for group in groups))
    limit, found = max(group.seconds(max(each, group.least)) for group in groups), None
    for _ in range(_ROUNDS):
        most = [min(group.most_within(limit), total) for group in groups]
        if any(own < group.least for own, group in zip(most, groups, strict=True)):
            break
        if sum(own * group.count for own, group in zip(most, groups, strict=True)) < total:
            break
        found = most
        slowest = max(
            group.seconds(own)
            for own, group in zip(_trimmed(groups, most, total), groups, strict=True)
        )
        limit = min(slowest, limit) * (1 - 1e-9)
    return _dealt_choice(choice, groups, found, total) if found else None


@dataclass
class _Group:
    evaluator: Evaluator
    choice: Choice
    group: ReplicaChoice
    _seconds: dict[int, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.group.dp_replicate

    @property
    def least(self) -> int:
        return SCHEDULE_KINDS[self.choice.schedule].least_microbatches(self.group.pp)

    def seconds(self, microbatches: int) -> float:
        """Of a step with so many microbatches of a replica."""
        if microbatches not in self._seconds:
            own = replace(self.group, microbatches=max(microbatches, self.least))
            cost = self.evaluator.least_group(self.choice, own)
            self._seconds[microbatches] = cost
        return self._seconds[microbatches]

    def most_within(self, limit: float) -> int:
        """The most microbatches of a replica in this time; 0 if none."""
        low, high = 0, 1
        while self.seconds(high) <= limit:
            low, high = high, 2 * high
        return low + bisect_right(range(low + 1, high), limit, key=self.seconds)


def _trimmed(groups: list[_Group], most: list[int], total: int) -> list[int]:
    """The most that a replica of each group has, if none has more than it must."""
    surplus = sum(own * group.count for own, group in zip(most, groups, strict=True)) - total
    found = list(most)
    while surplus > 0:
        order = [
            place
            for place, group in enumerate(groups)
            if group.count <= surplus and found[place] > group.least
        ]
        if not order:
            break
        slowest = max(order, key=lambda place: groups[place].seconds(found[place]))
        found[slowest] -= 1
        surplus -= groups[slowest].count
    return found


def _dealt_choice(choice: Choice, groups: list[_Group], most: list[int], total: int) -> Choice:
    found = _trimmed(groups, most, total)
    surplus = sum(own * group.count for own, group in zip(found, groups, strict=True)) - total
    replicas = list[ReplicaChoice]()
    for group, own in sorted(
        zip(groups, found, strict=True), key=lambda pair: -pair[0].seconds(pair[1])
    ):
        fewer = min(surplus, group.count) if own > group.least else 0
        surplus -= fewer
        each, more = (own - 1, group.count - fewer) if fewer else (own, 0)
        replicas += dealt(group.group, group.count, each, more)
    return replace(choice, replicas=tuple(replicas))
