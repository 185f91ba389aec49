"""A rank is really killed at a named point of a step; the other ranks recover and continue to
train.

Each process is a `Survivor`: a session over synthetic batches, with the numbers of every step that
it has applied. `Deadly` makes one rank die at a point:

    forward   of its second microbatch        backward   of the first block, in its last one
    late      as forward, but when all other ranks have computed their parts
    `whole`   holding the complete gradient   told N     its vote has reached N ranks only
    voted     before its update               applied    after it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch

from holdfast.core.sharding.reduction_tree import deal
from holdfast.data.stream.batch import Batches, ValidationSet
from holdfast.errors import PeerLostError
from holdfast.events import BatchFed, Event, StepDone
from holdfast.layout import Topology
from holdfast.parallel.axes.process_groups import connect
from holdfast.parallel.axes.replica_groups import ConnectSettings
from holdfast.training.engine import engine as engine_module
from holdfast.training.engine.build import TrainingSession, build_engine, make_session
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.objective import NextTokenObjective
from holdfast.training.engine.step_plan import Dealer
from holdfast.training.engine.vote import StepVerdict
from holdfast.training.recover.recover import GenerationEntry, RecoveryResult
from tests.support.layouts import VOCABULARY, case, config_of, topology_of
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import CPU, digest, feed

SIZE = 4  # samples of a microbatch
DIES, LAST = 3, 5  # the step in which a rank is lost, and the last of all
OVERFLOWING = 12  # doublings of the initial loss scale, with which steps 1 to 4 are skipped in fp16


@dataclass(frozen=True)
class Entered:
    """A microbatch with a ledger entry."""

    inputs: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None
    tokens: int
    entries: list[dict[str, Any]]
    side: dict[str, torch.Tensor] = field(default_factory=dict)


class Data:
    """What a session asks of `Batches`."""

    def microbatch(self, step: int, leaf: int, part: int = 0, parts: int = 1) -> Entered:
        fed = feed(step, leaf, SIZE, part, parts, VOCABULARY)
        entry = {"microbatch": leaf, "start": 0, "stop": 0, "part": [part, parts]}
        return Entered(fed.inputs, fed.targets, fed.documents, fed.tokens, [entry])

    def validation(self, samples: int) -> ValidationSet:
        return ValidationSet([], 0, 1.0)


DATA = cast(Batches, Data())


def config_for(name: str, microbatches: int = 6) -> Any:
    changes = {"train__steps": 50, "train__batch_size": SIZE * microbatches}
    return config_of({"model__layers": 2, **case(name).changes, **changes})


def assert_undisturbed(values: Sequence[dict[str, Any]], layout: str = "one", *more: int) -> None:
    """Each has the curve and the last state of the run that nothing disturbed, bit by bit."""
    (alone,) = undisturbed(layout, *more)
    for value in values:
        assert value["curve"] == alone["curve"]
        assert value["digest"] == alone["digest"]


def topology_for(name: str, generation: int, ranks: Sequence[int] | None = None) -> Topology:
    return topology_of(case(name), config_for(name), generation, ranks)


class Survivor:
    """One process over its generations. curve: loss, norm and an objective's means of each step
    that it applied. data: what a session asks of `Batches`."""

    data: Any = DATA

    def __init__(self, rank: RankContext, name: str, microbatches: int = 6) -> None:
        self.rank, self.me = rank, rank.rank
        self.config = self.configured(name, microbatches)
        self.curve: dict[int, list[float]] = {}
        self.events: list[list[Any]] = []
        self.session: TrainingSession | None = None
        self.step = 0
        self.computed: dict[int, int] = {}  # microbatches, by step

    def configured(self, name: str, microbatches: int) -> Any:
        return config_for(name, microbatches)

    @property
    def engine(self) -> StepEngine:
        assert self.session is not None
        return self.session.engine

    def begin(self, topology: Topology, dealer: Dealer = deal) -> None:
        ep = self.config.layout.ep
        groups = connect(
            ConnectSettings(self.rank.store(), CPU, seconds=120, ep=ep), topology, self.me
        )
        engine = build_engine(self.config, groups, CPU, dealer=dealer)
        engine.initialise(self.config.seed)
        for words in engine.loss_scale.state():
            words.tensor[0] = OVERFLOWING
        self.session = make_session(self.config, engine, self.data, CPU)
        self._count()

    def train(self, last: int) -> None:
        """Steps up to `last`. Raises PeerLostError."""
        while self.step < last:
            self.one_step(self.step + 1)

    def one_step(self, step: int) -> None:
        engine, place = self.engine, self.engine.groups.coordinate
        parts = engine.groups.degree("dp_shard")
        share = engine.begin(step)
        batches = [self.data.microbatch(step, j, place.dp_shard, parts) for j in share]
        engine.compute(batches)
        self.rank.mark(f"computed {step}")
        verdict = engine.reduce()
        engine.apply(verdict)
        self._applied(step, verdict)

    def _count(self) -> None:
        """Note how many microbatches are given to the model."""
        executor: Any = self.engine.executor
        plain = type(executor).train

        def train(share: Sequence[Any], *arguments: Any) -> Any:
            step = self.engine.step
            self.computed[step] = self.computed.get(step, 0) + len(share)
            return plain(executor, share, *arguments)

        executor.train = train

    def _applied(self, step: int, verdict: StepVerdict) -> None:
        assert step == self.step + 1
        self.step = step
        means = self.engine.metrics(verdict).values()
        self.curve[step] = [verdict.mean_loss, verdict.mean_norm, *means]
        self.engine.history.unreported_step = 0  # as the runner does once it has told of it

    def lose(self, last: int) -> None:
        """Train until a peer is lost, as it must be before `last` is over."""
        try:
            self.train(last)
        except PeerLostError:
            return
        raise AssertionError("nobody was lost")

    def stop(self, step: int, after: int) -> None:
        """Train until this rank interrupts itself in `step`, after so many of its microbatches;
        with 0 at once."""
        passes = 0

        def count(*_: Any) -> None:
            nonlocal passes
            passes += 1
            if passes == after:
                self.engine.interrupt(False)

        if after == 0:
            self.engine.interrupt(False)
        hook = self.engine.objective.register_forward_pre_hook(count)
        self.lose(step)
        hook.remove()

    def recover(
        self, topology: Topology, came_from: Sequence[int | None], dealer: Dealer = deal
    ) -> RecoveryResult:
        """Into a generation as the process that `came_from` calls by its old rank."""
        assert self.session is not None
        old = self.session.groups.rank
        self.me = list(came_from).index(old)
        entry = self._entry(topology, self.session.groups.topology, came_from, dealer)
        found = entry.recover(self.session, self.step)
        self._entered(found)
        return found

    def join(
        self,
        topology: Topology,
        before: Topology,
        came_from: Sequence[int | None],
        me: int,
        dealer: Dealer = deal,
    ) -> RecoveryResult:
        self.me = me
        found = self._entry(topology, before, came_from, dealer).join(self.data)
        self.step = found.step
        self._entered(found)
        return found

    def _entry(
        self, topology: Topology, before: Topology, came_from: Sequence[int | None], dealer: Dealer
    ) -> GenerationEntry:
        where = topology, self.me, self.rank.store(), CPU, before
        return GenerationEntry(self.config, *where, came_from, dealer=dealer, seconds=60)

    def _entered(self, found: RecoveryResult) -> None:
        self.session = found.session
        self._count()
        if found.step > self.step:
            assert found.verdict is not None
            self._applied(found.step, found.verdict)
        assert found.step == self.step == self.engine.status.applied_step
        self.events += [_plain(event) for event in found.events]

    def result(self) -> dict[str, Any]:
        at = self.engine.groups.coordinate
        out = {
            "curve": self.curve,
            "digest": digest(self.engine),
            "place": at.mesh_rank,
            "replica": at.replica,
            "events": self.events,
            "computed": self.computed,
        }
        self.engine.close()
        return out


def _plain(event: Event) -> list[Any]:
    """Something that can be a process's value."""
    if isinstance(event, BatchFed):
        fed = [[e["microbatch"], e["part"], bool(e.get("stands_in"))] for e in event.entries]
        return ["fed", event.step, fed]
    assert isinstance(event, StepDone)
    return ["done", event.step, [event.loss, event.grad_norm, *event.metrics.values()]]


class Deadly:
    """Makes this process die in a step, if it is the victim; the other ranks report their
    progress."""

    def __init__(self, survivor: Survivor, victim: int, step: int, when: str) -> None:
        self.survivor, self.victim, self.step = survivor, victim, step
        self.when, _, told = when.partition(" ")
        self.told = int(told or 0)
        topology = survivor.engine.groups.topology
        self.doomed = topology.replica_of(victim).ranks
        rank = survivor.rank
        if rank.rank != victim:
            self._replace("share_verdict", self._marked)
            return
        getattr(self, f"_{self.when}")()

    def die(self, *_: Any) -> None:
        if self.survivor.engine.step == self.step:
            self.survivor.rank.kill(self.victim)

    def _replace(self, name: str, make: Callable[[Any], Any]) -> None:
        setattr(engine_module, name, make(getattr(engine_module, name)))

    def _marked(self, meet: Any) -> Any:
        def marking(groups: Any, verdict: Any, sums: int) -> Any:
            if verdict is not None and self.survivor.engine.step == self.step:
                self.survivor.rank.mark("heard")
            return meet(groups, verdict, sums)

        return marking

    # --- where it dies --------------------------------------------------------------------
    def _count(self, number: int) -> Callable[..., None]:
        """Dies at call `number` of the step."""
        calls = 0

        def call(*_: Any) -> None:
            nonlocal calls
            if self.survivor.engine.step == self.step:
                calls += 1
                if calls == number:
                    self.die()

        return call

    def _forward(self) -> None:
        self.survivor.engine.objective.register_forward_pre_hook(self._count(2))

    def _late(self) -> None:
        share = self.survivor.engine.plan.share(self.step)
        rank, die = self.survivor.rank, self._count(min(2, len(share)))

        def wait(*_: Any) -> None:
            if self.survivor.engine.step == self.step:
                for other in range(self.survivor.engine.groups.topology.world_size):
                    if other not in self.doomed:
                        rank.wait_mark(f"computed {self.step}", other)
            die()

        self.survivor.engine.objective.register_forward_pre_hook(wait)

    def _backward(self) -> None:
        decoder = cast(NextTokenObjective, self.survivor.engine.objective).decoder
        block = next(iter(decoder.layers))
        share = self.survivor.engine.plan.share(self.step)
        block.register_full_backward_pre_hook(self._count(len(share)))

    def _whole(self) -> None:
        self._replace("vote", lambda _: self.die)

    def _told(self) -> None:
        """Its ballot goes to some only, who must have heard it before it dies."""
        groups = self.survivor.engine.groups
        control, say = groups.control, groups.control.send_to_all
        to = list(control.others)[: self.told]

        def some(record: Any, tag: int) -> None:
            if tag != 1 or self.survivor.engine.step != self.step:
                say(record, tag)
                return
            sends = [control.group.send([record], peer, tag) for peer in to]
            for peer in to:
                self.survivor.rank.wait_mark("heard", groups.positions[peer])
            self.die(sends)

        control.send_to_all = some  # type: ignore[method-assign]

    def _voted(self, is_applied: bool = False) -> None:
        engine = self.survivor.engine
        plain = type(engine).update

        def update(verdict: StepVerdict) -> float:
            if not is_applied:
                self.die()
            rate = plain(engine, verdict)
            self.die()
            return rate

        engine.update = update  # type: ignore[method-assign]

    def _applied(self) -> None:
        self._voted(is_applied=True)


def _undisturbed(rank: RankContext, name: str, microbatches: int) -> dict[str, Any]:
    made = Survivor(rank, name, microbatches)
    made.begin(topology_for(name, 1))
    made.train(LAST)
    return made.result()


@cache
def undisturbed(name: str, microbatches: int = 6) -> list[dict[str, Any]]:
    """Return what each rank of one replica has if no rank is lost."""
    arguments = {"name": name, "microbatches": microbatches}
    return list(rank_values(_undisturbed, case(name).world_size, arguments))
