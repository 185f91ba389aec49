"""The loop behind `holdfast cloud follow`: orders and ends instances by the cheapest mix.

Each round it reads the run's progress, the prices and the instances, and calls `choose_mix`. If the
mix changes, it orders first. An instance that is not wanted any more ends when the new nodes have
joined the run. Instances carry their run and node as tags, so a loop that starts again takes them
over. `follow.json` in the run folder keeps the dollars, the begin and the last plan.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path

from holdfast.core.json_parsing import parse_json
from holdfast.errors import HoldfastError
from holdfast.plan.catalogue import Offer
from holdfast.report.formatting import format_duration
from holdfast.wire.secret_managers.request import SecretManagerError
from holdfast.wire.store.publish import replace_file
from holdfast_platform.clouds.ec2 import CapacityError, Fleet, Instance
from holdfast_platform.clouds.mix import Mix, Need, choose_mix

STATE_FILE = "follow.json"
CAPACITY_WAIT_S = 1200.0
"""Seconds for which an offer without capacity counts as sold out."""
LISTING_LAG_S = 60.0
"""Seconds after its order for which an instance may be missing in the cloud's list."""
_MIN_MEASURED_SHARE = 0.05
"""Share of the run's steps from which on its measured speed replaces `Goal.work_h`."""
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Goal:
    """What the run needs."""

    work_h: float  # hours of one node for the entire run, as the user estimates
    min_nodes: int
    max_nodes: int
    finish_h: float | None  # hours from the first start of the loop; None: no deadline
    change_h: float  # hours that the run loses with a change of nodes
    budget: float | None  # US dollars in all; None: no limit


@dataclass(frozen=True)
class Progress:
    """How far the run is. nodes: that take part or wait as spares."""

    step: int
    steps: int
    nodes: frozenset[str]
    is_finished: bool


@dataclass
class FollowState:
    """What outlives the loop."""

    began: float  # seconds since 1970
    billed_until: float  # seconds since 1970
    spent: float = 0.0  # US dollars
    first_plan: float = 0.0  # US dollars for the entire run, as planned at the begin
    plan: float = 0.0  # the same, as planned at the latest change of the mix
    next_node: float = 0.0  # number in the name of the next node: no name is used twice

    @staticmethod
    def read(folder: Path, now: float) -> FollowState:
        """Return the state of an earlier loop, or a new one."""
        try:
            found = parse_json((folder / STATE_FILE).read_text("utf-8"))
            return FollowState(**{key: float(value) for key, value in dict(found).items()})
        except (OSError, ValueError, TypeError):
            return FollowState(now, now)

    def write(self, folder: Path) -> None:
        replace_file(folder / STATE_FILE, json.dumps(asdict(self)) + "\n")


@dataclass
class Follower:
    """One loop over a run. Call `round` until it returns an exit code."""

    fleet: Fleet
    goal: Goal
    folder: Path
    offers: Callable[[], Sequence[Offer]]  # prices of this moment, in US dollars an hour of a node
    progress: Callable[[], Progress]
    script: Callable[[str], str]  # of a node: what its instance runs when it starts
    say: Callable[[str], None]
    clock: Callable[[], float] = time.time
    _state: FollowState = field(init=False)
    _live: dict[str, Instance] = field(default_factory=dict)  # by id, in the last round
    _ended: set[str] = field(default_factory=set)  # ids that this loop has ended
    _target: dict[str, int] | None = None  # offer -> nodes
    _sold_out: dict[str, float] = field(default_factory=dict)  # offer -> until when
    _mark: tuple[float, Progress, frozenset[str]] | None = None
    _measured: tuple[float, int] = (0.0, 0)  # node-hours and steps of rounds without a change
    _last_line: str = ""

    def __post_init__(self) -> None:
        self._state = FollowState.read(self.folder, self.clock())

    def round(self) -> int | None:
        """Bring the instances to the mix of this moment. Return the exit code at the end."""
        now = self.clock()
        try:
            offers = list(self.offers())
            everything = self.fleet.instances()
            listed = {each.id for each in everything}
            # The list may lag behind an order.
            everything += [
                each
                for each in self._live.values()
                if each.id not in listed and now - each.launched < LISTING_LAG_S
            ]
            live = [each for each in everything if each.is_live]
            self._note_changes(live)
            self._bill(live, offers, now)
            progress = self.progress()
            self._measure(now, progress, live)
            if progress.is_finished:
                return self._finish(live)
            if self.goal.budget is not None and self._state.spent >= self.goal.budget:
                return self._stop_at_budget(live, progress)
            for _ in offers:  # one that is sold out leaves another choice
                if self._follow(now, offers, everything, live, progress):
                    break
        except SecretManagerError as error:
            self._say_once(f"the cloud does not answer ({error}); the loop asks again")
        except HoldfastError as error:  # the bucket is away, or the price file is half written
            self._say_once(f"{error}; the loop tries again")
        return None

    def running_words(self) -> list[str]:
        """Say what is paid for now."""
        prices = {offer.name: offer.price for offer in self.offers()}
        live = [each for each in self.fleet.instances() if each.is_live]
        if not live:
            return ["no instance of this run is left"]
        rate = sum(prices.get(each.offer, 0.0) for each in live)
        named = ", ".join(f"{each.node} ({each.id})" for each in live)
        return [f"{len(live)} instances are still at work, for ${rate:.2f} an hour: {named}"]

    # --- one round ------------------------------------------------------------------------------
    def _note_changes(self, live: Sequence[Instance]) -> None:
        """Name the instances that are new to this loop, and those that the cloud took back."""
        now = {each.id: each for each in live}
        for gone in self._live.keys() - now.keys() - self._ended:
            lost = self._live[gone]
            self.say(f"the cloud took back {lost.node} ({lost.id}, {_kind(lost.offer)})")
        if self._target is None and live:
            self.say(f"taken over: {', '.join(f'{each.node} ({each.id})' for each in live)}")
        self._live = now

    def _bill(self, live: Sequence[Instance], offers: Sequence[Offer], now: float) -> None:
        """Add what the instances cost since the last round."""
        prices = {offer.name: offer.price for offer in offers}
        for each in live:
            seconds = now - max(self._state.billed_until, min(each.launched, now))
            self._state.spent += prices.get(each.offer, 0.0) * max(0.0, seconds) / _HOUR_S
        self._state.billed_until = now
        self._state.write(self.folder)

    def _measure(self, now: float, progress: Progress, live: Sequence[Instance]) -> None:
        """Count node-hours and steps between two rounds with the same nodes at work."""
        nodes = frozenset(each.node for each in live) & progress.nodes
        if self._mark is not None:
            at, before, nodes_before = self._mark
            if nodes == nodes_before and before.step and progress.step >= before.step:
                hours, steps = self._measured
                done = progress.step - before.step
                workers = min(len(nodes), self.goal.max_nodes)
                self._measured = hours + workers * (now - at) / _HOUR_S, steps + done
        self._mark = now, progress, nodes

    def _work_left(self, progress: Progress) -> float:
        """Return node-hours, by the measured speed as soon as there is one."""
        hours, steps = self._measured
        is_measured = steps >= max(2, _MIN_MEASURED_SHARE * progress.steps)
        of_step = hours / steps if is_measured else self.goal.work_h / progress.steps
        return (progress.steps - progress.step) * of_step

    def _follow(
        self,
        now: float,
        offers: Sequence[Offer],
        everything: Sequence[Instance],
        live: Sequence[Instance],
        progress: Progress,
    ) -> bool:
        """Return False if an offer turned out to be sold out."""
        goal, counts = self.goal, _counts(list(self._live.values()))
        finish_h = inf if goal.finish_h is None else goal.finish_h
        need = Need(
            self._work_left(progress),
            max(0.0, finish_h - (now - self._state.began) / _HOUR_S),
            goal.min_nodes,
            goal.max_nodes,
            change_h=goal.change_h,
        )
        sold = [
            replace(offer, available=counts.get(offer.name, 0))
            if self._sold_out.get(offer.name, 0.0) > now
            else offer
            for offer in offers
        ]
        wanted = counts if self._target is None else self._target
        current = {name: min(number, counts.get(name, 0)) for name, number in wanted.items()}
        mix = choose_mix(sold, need, current)
        if mix is None:
            self._say_once("the cloud sells too few nodes now; the loop asks again")
            return True
        if dict(mix.nodes) != self._target:
            # Until the new nodes have joined, the old ones are paid for, too.
            overlap = goal.change_h * sum(
                offer.price * max(0, counts.get(offer.name, 0) - mix.nodes.get(offer.name, 0))
                for offer in offers
            )
            self._plan(mix, progress, overlap)
        if not self._order(mix, offers, everything, counts, now):
            return False
        self._end_surplus(mix, live, progress)
        return True

    def _plan(self, mix: Mix, progress: Progress, overlap: float) -> None:
        self._target = dict(mix.nodes)
        state = self._state
        state.plan = state.spent + mix.cost + overlap
        state.first_plan = state.first_plan or state.plan
        nodes = ", ".join(f"{n} {_kind(name)}" for name, n in mix.nodes.items())
        late = "" if mix.in_time else "TOO LATE: "
        self.say(
            f"step {progress.step:,} of {progress.steps:,}: {nodes}, "
            f"{format_duration(mix.hours * _HOUR_S)} to go; spent ${state.spent:.4f}, planned "
            f"${state.plan:.4f} in all ({late}{mix.reason})"
        )
        state.write(self.folder)

    def _order(
        self,
        mix: Mix,
        offers: Sequence[Offer],
        everything: Sequence[Instance],
        counts: dict[str, int],
        now: float,
    ) -> bool:
        """Order what is missing. Return False if an offer turned out to be sold out."""
        by_name = {offer.name: offer for offer in offers}
        listed = [_number(each.node) for each in (*everything, *self._live.values())]
        number = max(int(self._state.next_node), 1 + max(listed, default=-1))
        for name, count in mix.nodes.items():
            for _ in range(count - counts.get(name, 0)):
                node = f"node-{number}"
                try:
                    made = self.fleet.order(
                        node, name, spot=by_name[name].spot, script=self.script(node)
                    )
                except CapacityError as error:
                    self.say(f"the cloud has no {_kind(name)} node now ({error})")
                    self._sold_out[name] = now + CAPACITY_WAIT_S
                    return False
                self._live[made.id] = made
                counts[name] = counts.get(name, 0) + 1
                self.say(f"ordered {made.node} ({made.id}, {_kind(name)})")
                number += 1
                self._state.next_node = number
                self._state.write(self.folder)
        return True

    def _end_surplus(self, mix: Mix, live: Sequence[Instance], progress: Progress) -> None:
        """End what is not wanted, when the wanted nodes have joined the run."""
        wanted, surplus = dict(mix.nodes), list[Instance]()
        joined = 0
        for each in live:
            if wanted.get(each.offer, 0) > 0:
                wanted[each.offer] -= 1
                joined += each.node in progress.nodes
            else:
                surplus.append(each)
        if surplus and joined >= mix.size:
            self._end(surplus)

    # --- ends -----------------------------------------------------------------------------------
    def _end(self, instances: Sequence[Instance]) -> None:
        ids = [each.id for each in instances]
        self.fleet.end(ids)
        self._ended |= set(ids)
        for each in instances:
            self.say(f"ended {each.node} ({each.id}, {_kind(each.offer)})")

    def _finish(self, live: Sequence[Instance]) -> int:
        self._end(live)
        state = self._state
        share = state.spent / state.plan - 1 if state.plan else 0.0
        self.say(
            f"the run is finished: spent ${state.spent:.4f}, {share:+.1%} of the latest plan of "
            f"${state.plan:.4f}; the first plan was ${state.first_plan:.4f}"
        )
        return 0

    def _stop_at_budget(self, live: Sequence[Instance], progress: Progress) -> int:
        self._end(live)
        self.say(
            f"the budget of ${self.goal.budget:.2f} is spent at step {progress.step:,} of "
            f"{progress.steps:,}; continue with a higher --budget"
        )
        return 1

    def _say_once(self, line: str) -> None:
        if line != self._last_line:
            self.say(line)
        self._last_line = line


def _counts(live: Sequence[Instance]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in live:
        found[each.offer] = found.get(each.offer, 0) + 1
    return found


def _kind(offer: str) -> str:
    return offer.rpartition("/")[2]


def _number(node: str) -> int:
    tail = node.rpartition("-")[2]
    return int(tail) if tail.isdecimal() else -1
