"""Work and saves of a run between two changes, in closed form.

A stretch of constant speed is a sequence of work and saves. The intervals say how many saves it
has, when the last ones were, and what they hold. So no step and no save is walked through. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import ceil, floor, inf

from holdfast_lab.engine.interfaces import SavePlan, TierSave

_TINY = 1e-9
_MARKS = 8
"""Saves of a tier that are remembered: those that are not durable yet, and the newest that is."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A save. usable_s: the time from which it may be used. tokens, productive, blocked: of the
    run's kept line when it was made."""

    usable_s: float
    tokens: float
    productive: float
    blocked: float

    def marks(self) -> list[Mark]:
        return [self]


_Saves = tuple[float, float, float]
"""Saves into a tier in a stretch: seconds since the last one, interval, seconds of each."""


@dataclass(slots=True)
class _Stretch:
    """Work and saves that were taken at once, from the values at its start. tiers: the saves into
    each. It is never changed."""

    now: float
    tokens: float
    productive: float
    blocked: float
    rate: float
    step_tokens: float
    tiers: tuple[_Saves, ...]

    def mark(self, work: float, durable_s: float) -> Mark:
        """The save that is made after `work` seconds, and is usable `durable_s` later."""
        halted = sum(
            floor((since + work) / interval + 1e-9) * blocked
            for since, interval, blocked in self.tiers
        )
        tokens = self.tokens + work * self.rate
        saved = whole_steps(tokens, self.step_tokens)
        return Mark(
            self.now + work + halted + durable_s,
            saved,
            self.productive + work - (tokens - saved) / self.rate,
            self.blocked + halted,
        )


@dataclass(slots=True)
class _Marks:
    """Saves `first` to `last` of one tier in a stretch. They are worked out when they are needed,
    which most saves never are. It is never changed."""

    stretch: _Stretch
    saves: _Saves
    durable_s: float
    first: int
    last: int

    def marks(self) -> list[Mark]:
        since, interval, _ = self.saves
        return [
            self.stretch.mark(number * interval - since, self.durable_s)
            for number in range(self.first, self.last + 1)
        ]


def whole_steps(tokens: float, step_tokens: float) -> float:
    """Tokens of the steps that are complete; all of them if steps do not matter."""
    if not step_tokens:
        return tokens
    return min(tokens, floor(tokens / step_tokens + 1e-6) * step_tokens)


_START = Mark(0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class _Kept:
    """What a tier has, whatever the plan: saves and bytes made so far, and the newest marks."""

    saves: int = 0
    bytes: float = 0.0
    marks: list[Mark | _Marks] = field(default_factory=list)

    def add(self, number: int, size: float, mark: Mark | _Marks) -> None:
        """So many saves of `size` bytes were made; `mark` has the newest."""
        self.saves += number
        self.bytes += number * size
        self.marks.append(mark)
        if len(self.marks) > _MARKS:
            del self.marks[0]


@dataclass(slots=True)
class _Tier:
    """since: seconds of work since the last save. unsure: saves before the last one that may be the
    newest usable one."""

    plan: TierSave
    interval: float
    since: float
    kept: _Kept
    unsure: int = 0


@dataclass(slots=True)
class LostWork:
    """tokens; productive and blocked: seconds that were spent on them. partial_s: of them, seconds
    of the unfinished step. saved: tokens that stay."""

    tokens: float
    productive: float
    blocked: float
    partial_s: float
    saved: float


@dataclass(slots=True)
class Progress:
    """The kept line of a run: tokens, and the seconds that they took.

    step_tokens: of one step; 0 if steps do not matter. rate: tokens a second of work now.
    """

    step_tokens: float = 0.0
    tokens: float = 0.0
    productive: float = 0.0
    blocked: float = 0.0
    rate: float = 0.0
    block_left: float = 0.0
    _in_save: list[_Tier] = field(default_factory=list)
    _tiers: dict[int, _Tier] = field(default_factory=dict)
    _pause: float = 0.0
    _share: float = 1.0
    _least: float = inf
    _is_rounded: bool = False
    _planned: tuple[TierSave, ...] = ()
    _kept: dict[int, _Kept] = field(default_factory=dict)

    # --- what holds from now on -----------------------------------------------------------------
    def set_rate(self, tokens_per_s: float) -> None:
        self.rate, self._is_rounded = tokens_per_s, False

    def set_plan(self, plan: SavePlan) -> None:
        """Save by this plan; what was worked since the last save still counts."""
        if plan.tiers is self._planned:
            return
        self._planned = plan.tiers
        old = self._tiers
        self._tiers = {}
        for each in plan.tiers:
            if each.interval_s == inf:
                continue
            before = old.get(each.tier)
            kept = before.kept if before else self._kept.setdefault(each.tier, _Kept())
            since = before.since if before else 0.0
            self._tiers[each.tier] = _Tier(each, each.interval_s, since, kept)
        self._is_rounded = False

    def _round_intervals(self) -> None:
        """Saves are made at the end of a step."""
        self._is_rounded = True
        step = self.step_tokens / self.rate if self.rate > 0 else 0.0
        pause, share, least = 0.0, 1.0, inf
        for tier in self._tiers.values():
            plan = tier.plan
            interval, blocked = plan.interval_s, plan.blocked_s
            if step:
                interval = (ceil(interval / step - 1e-6) or 1) * step
            tier.interval = interval
            if tier.since > interval:
                tier.since = interval  # a save that is overdue comes at once
            tier.unsure = min(_MARKS - 2, ceil(plan.durable_s / interval))
            pause += blocked
            share += blocked / interval
            if interval < least:
                least = interval
        self._pause, self._share, self._least = pause, share, least

    # --- time passes ----------------------------------------------------------------------------
    def advance(self, now: float, seconds: float) -> None:
        """The run trains from `now` for so many seconds, saves included."""
        if not self._tiers:
            self._work(seconds)
            return
        if not self._is_rounded:
            self._round_intervals()
        tiers = self._tiers.values()
        left = seconds
        if self.block_left > 0:
            left = self._finish_save(now, left)
        if left <= 0:
            return
        work = (left - self._pause) / self._share
        if work > 2 * self._least:
            left = self._jump(now + seconds - left, left, work, tiers)
        while left > _TINY:
            ahead = left
            for tier in tiers:
                gap = tier.interval - tier.since
                if gap < ahead:
                    ahead = gap if gap > 0 else 0.0
            self._work(ahead, tiers)
            if ahead == left:
                return
            left -= ahead
            due = [tier for tier in tiers if tier.interval - tier.since <= _TINY]
            self.block_left = sum(tier.plan.blocked_s for tier in due)
            self._in_save = due
            for tier in due:
                tier.since = 0.0
            left = self._finish_save(now + seconds - left, left)

    def _finish_save(self, now: float, left: float) -> float:
        spent = min(self.block_left, left)
        self.blocked += spent
        self.block_left -= spent
        if self.block_left <= _TINY and self._in_save:
            self.block_left = 0.0
            for tier in self._in_save:
                at = now + spent + tier.plan.durable_s
                mark = self._mark(at, self.tokens, self.productive, self.blocked)
                tier.kept.add(1, tier.plan.bytes, mark)
            self._in_save = []
        return left - spent

    def _work(self, seconds: float, tiers: Collection[_Tier] = ()) -> None:
        self.tokens += seconds * self.rate
        self.productive += seconds
        for tier in tiers:
            tier.since += seconds

    def _jump(self, now: float, left: float, work: float, tiers: Collection[_Tier]) -> float:
        """Take so many seconds of work at once, with its saves; return the seconds left."""
        before = tuple([(tier.since, tier.interval, tier.plan.blocked_s) for tier in tiers])
        stretch = _Stretch(
            now, self.tokens, self.productive, self.blocked, self.rate, self.step_tokens, before
        )
        spent = 0.0
        for tier, saves in zip(tiers, before, strict=True):
            since, interval, blocked = saves
            count = floor((since + work) / interval)
            spent += count * blocked
            since = since + work - count * interval
            tier.since = since if since > 0 else 0.0
            if count:
                first, plan = count - tier.unsure, tier.plan
                made = _Marks(stretch, saves, plan.durable_s, first if first > 1 else 1, count)
                tier.kept.add(count, plan.bytes, made)
        self._work(work)
        self.blocked += spent
        return left - work - spent

    def seconds_for(self, tokens: float) -> float:
        """Seconds of training, saves included, until the kept line has so many tokens."""
        if not self._is_rounded:
            self._round_intervals()
        work = (tokens - self.tokens) / self.rate
        tiers = self._tiers.values()
        saves = sum(
            floor((tier.since + work) / tier.interval) * tier.plan.blocked_s for tier in tiers
        )
        return self.block_left + work + saves

    def until_step_end(self) -> float:
        """Seconds until the step ends that is under way; 0 if none is."""
        if not self.step_tokens or self.rate <= 0:
            return 0.0
        left = self.step_tokens - (self.tokens - whole_steps(self.tokens, self.step_tokens))
        return self.block_left + (left / self.rate if left < self.step_tokens * (1 - 1e-6) else 0.0)

    @property
    def unsaved_s(self) -> float:
        """Seconds of work since the newest save, of any tier."""
        runs = [kept.marks[-1].marks() for kept in self._kept.values() if kept.marks]
        return self.productive - max([run[-1].productive for run in runs], default=0.0)

    @property
    def saves(self) -> dict[int, int]:
        """Made so far, by tier."""
        return {tier: kept.saves for tier, kept in self._kept.items()}

    @property
    def bytes(self) -> dict[int, float]:
        """Saved so far, by tier."""
        return {tier: kept.bytes for tier, kept in self._kept.items()}

    # --- saves ----------------------------------------------------------------------------------
    def _mark(self, usable: float, tokens: float, productive: float, blocked: float) -> Mark:
        """A save holds complete steps."""
        whole = whole_steps(tokens, self.step_tokens)
        if self.rate > 0:
            productive -= (tokens - whole) / self.rate
        return Mark(usable, whole, productive, blocked)

    def lose_step(self) -> LostWork:
        """Only the unfinished step is lost, and a save that was under way."""
        self.block_left, self._in_save = 0.0, []
        partial = self.tokens - whole_steps(self.tokens, self.step_tokens)
        seconds = partial / self.rate if self.rate > 0 else 0.0
        self.tokens -= partial
        self.productive -= seconds
        for tier in self._tiers.values():
            tier.since = tier.since - seconds if tier.since > seconds else 0.0
        return LostWork(partial, seconds, 0.0, seconds, self.tokens)

    def return_to_save(self, now: float, tiers: Collection[int]) -> LostWork:
        """Go back to the newest save of these tiers that is usable now. Later saves are dropped."""
        partial = self.lose_step()
        best = _START
        found: dict[int, list[Mark]] = {}
        for tier, kept in self._kept.items():
            if tier not in tiers:
                kept.marks.clear()
                continue
            found[tier] = [mark for each in kept.marks for mark in each.marks()][-_MARKS:]
            for mark in reversed(found[tier]):
                if mark.usable_s <= now + _TINY:
                    best = mark if mark.tokens > best.tokens else best
                    break
        for tier, marks in found.items():
            self._kept[tier].marks[:] = [mark for mark in marks if mark.tokens <= best.tokens]
        lost = LostWork(
            self.tokens - best.tokens + partial.tokens,
            self.productive - best.productive + partial.productive,
            self.blocked - best.blocked,
            partial.partial_s,
            best.tokens,
        )
        self.tokens, self.productive, self.blocked = best.tokens, best.productive, best.blocked
        for tier_state in self._tiers.values():
            tier_state.since = 0.0
        return lost
