"""The steps of a run with `server`: many updates each, by servers that own shards of the weights.

A step begins on all ranks with the same state. Each rank takes a copy of its shard, of the weights
and of what the optimizer keeps. While the step lasts, the module computes on weights that were
pulled. The state of the run changes when the step is applied, with what the servers hold then. So
dealing, vote and recovery are those of any step, and a step that fails anywhere has not happened.

`parallel/outer/parameter_server.py` has the messages, `policy/server_updates.py` the rules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.core.data.learner_fates import LearnerFate
from holdfast.core.sharding.reduction_tree import Shares
from holdfast.core.sharding.state_table import ADAPTATION_ROW
from holdfast.core.sharding.step_resume import Computed
from holdfast.core.weights import to_units
from holdfast.errors import CorruptError, DataError
from holdfast.events import Event, ServerUpdates, UpdatesAdapted
from holdfast.parallel.axes.replicated import ReplicatedGradients
from holdfast.parallel.gradients.feeder import GradientFeeder
from holdfast.parallel.gradients.grad_norm import NORM_BLOCK, clip_factor, sum_of_squares
from holdfast.parallel.outer.parameter_server import Push, ServerRecord, ServerStep, ShardSize
from holdfast.policy.server_updates import (
    Adaptation,
    StepMeasures,
    UpdateRule,
    adapt,
    rate_factor,
    stale_part,
    straggling_of,
)
from holdfast.training.engine.executors import Executor, Share
from holdfast.training.engine.objective import IGNORED_TARGET
from holdfast.training.engine.stage_work import GradientListener
from holdfast.training.engine.state import LocalTensor, Parameters
from holdfast.training.engine.step_status import PhaseTimer
from holdfast.training.optimizers.make_optimizer import UserParts, make_optimizer
from holdfast.training.optimizers.optimizer import Optimizer

if TYPE_CHECKING:
    from holdfast.training.engine.engine import StepEngine


def parameters_by_server(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """Return the indices of the parameters of each server, rising. The largest one that is left
    goes to the server with the fewest elements. sizes: elements of each parameter."""
    found: list[list[int]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        server = loads.index(min(loads))
        found[server].append(index)
        loads[server] += sizes[index]
    return [sorted(indices) for indices in found]


class ChangeOfStep(ReplicatedGradients):
    """Holds the change of the weights in a step, which every rank has, on this rank alone."""

    def begin(self, leaves: int, shares: Shares, computed: Computed = ()) -> None:
        """Start a step, whose change is one leaf. shares: of the ranks, which make no
        difference here."""
        super().begin(1, ((0,),))


class _ServedShard:
    """The parameters of one server, with an optimizer of their own, in the host's memory."""

    def __init__(
        self, config: RunConfig, parameters: Parameters, indices: list[int], user: UserParts
    ) -> None:
        self._config, self._count = config, len(indices)
        like = [parameters.master_tensors[i] for i in indices]
        self._weights = [torch.zeros_like(tensor, device="cpu") for tensor in like]
        self._gradients = [torch.zeros_like(tensor) for tensor in self._weights]
        rows = [parameters.table[i] for i in indices]
        held = rows, self._weights, self._gradients, user
        boxes = [parameters.boxes[i] for i in indices]
        self._optimizer = make_optimizer(config.train.optimizer, *held, None, boxes)

    def _state(self) -> list[Tensor]:
        slots = self._optimizer.slots
        return [*self._weights, *(t for slot in slots for t in slot.tensors if t is not None)]

    @torch.no_grad()
    def begin(
        self, state: Sequence[Tensor], rule: UpdateRule, before: Adaptation, rate: float
    ) -> None:
        """Start a step from its part of the run's state, in the order of `final`. rate: of an
        update of `server.update_microbatches`."""
        for tensor, value in zip(self._state(), state, strict=True):
            tensor.copy_(value)
        self._rule, self._before, self._rate = rule, before, rate
        self._squares = [0.0] * (2 * self._count)

    @torch.no_grad()
    def apply(self, pushes: Sequence[Push], version: int, staleness: int) -> None:
        """See `parameter_server.Shard`."""
        total = sum(push.weight for push in pushes) or 1.0
        mean = torch.zeros_like(pushes[0].gradient)
        for push in pushes:
            # In two operations: a fused one rounds the last elements of a shard otherwise.
            mean.add_(push.gradient * (push.weight / total))
        if self._config.server.grows:
            for push in pushes:
                self._add_squares(0, push.gradient)
            self._add_squares(self._count, mean)
        server, rule = self._config.server, self._rule
        usual = server.update_microbatches
        if not rule.is_synchronous:
            mean.mul_(stale_part(server.rate_scaling, staleness, usual))
        for gradient, part in zip(self._gradients, self._split(mean), strict=True):
            gradient.copy_(part)
        width = rule.width if rule.is_synchronous else 1
        factor = rate_factor(server.rate_scaling, width, usual)
        number = self._before.updates + version + 1
        self._optimizer.apply(number, self._rate * factor, 1.0, len(pushes))

    def _add_squares(self, first: int, flat: Tensor) -> None:
        for at, part in enumerate(self._split(flat), start=first):
            padded = F.pad(part.reshape(-1), (0, -part.numel() % NORM_BLOCK))
            self._squares[at] += float(sum_of_squares(padded))

    def _split(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [tensor.numel() for tensor in self._weights])
        return [part.view(t.shape) for part, t in zip(parts, self._weights, strict=True)]

    def weights(self) -> Tensor:
        """See `parameter_server.Shard`."""
        return _flat(self._weights)

    def final(self) -> Tensor:
        """See `parameter_server.Shard`."""
        return _flat(self._state())

    def squares(self) -> list[float]:
        """See `parameter_server.Shard`."""
        return self._squares


class ServerExecutor(Executor):
    """Runs the steps of one rank: its passes, and the servers' updates.

    passes: runs the passes of a microbatch. inner: sums its gradients, on this rank alone.
    parameters: the run's; the module computes on tensors of its own. recorded: what the journal has
    of each step, if steps are computed again: they are computed in their order. The rest is of
    `LearnerStates`.
    """

    applies_update = True

    def __init__(
        self,
        config: RunConfig,
        passes: Executor,
        inner: ReplicatedGradients,
        parameters: Parameters,
        user: UserParts,
    ) -> None:
        super().__init__(passes.arguments)
        self._config, self._passes, self._inner = config, passes, inner
        self._parameters, self._user = parameters, user
        self._sizes = [tensor.numel() for tensor in parameters.master_tensors]
        self.fates: Sequence[LearnerFate] = ()
        self.times = PhaseTimer()  # of rounds alone, which a step has none of
        self.on_progress: Callable[[], None] = lambda: None
        self.recorded: Mapping[int, ServerUpdates] | None = None
        self._numbers = torch.zeros(ADAPTATION_ROW.shape, dtype=torch.float64)
        self._indices: list[list[int]] = []  # of parameters, by server
        self._shards: dict[int, _ServedShard] = {}  # that this process serves
        self._step: ServerStep | None = None  # it holds what is still being sent
        self._finals: list[Tensor] = []  # by server, of the step that was computed last
        self._next = Adaptation()
        self._event: ServerUpdates | None = None

    def connect(self, engine: StepEngine) -> None:
        """engine: runs this executor, and has the run's groups and state."""
        self._engine = engine

    # --- a step ---------------------------------------------------------------------------
    def train(self, share: Share, listener: GradientListener, losses: list[Tensor]) -> None:
        """Compute the microbatches of this rank, and serve its shard, until the last update."""
        if not isinstance(listener, ChangeOfStep):  # a search for what is not finite
            self._passes.train(share, listener, losses)
            return
        step, before = self._engine.step, self.adaptation
        batches, found = dict(share), dict[int, Tensor]()
        recorded = None if self.recorded is None else _checked(self.recorded, step, batches)
        shares = self._engine.dealt_shares if recorded is None else _shares_of(recorded)
        rule = UpdateRule(
            sum(map(len, shares)),
            before.is_synchronous,
            before.width,
            self._config.server.staleness,
        )
        try:
            self._open_shards(len(shares), rule, before, step, recorded is not None)
            if recorded is None:
                records = self._exchange(shares, rule, batches, found, listener)
                straggling = straggling_of([record.seconds for record in records])
                squares = [record.squares for record in records]
                self._event = self._describe(step, before, rule, shares, records, straggling)
            else:
                self._replay(recorded, rule, before, batches, found, listener)
                straggling = recorded.straggling
                squares = [tuple(self._shards[s].squares()) for s in range(len(shares))]
                self._event = recorded
            small, large = self._mean_squares(squares, rule)
            size = self._config.train.microbatch_size
            measures = StepMeasures(size, small, large, straggling)
            self._next = adapt(self._config.server, before, rule, measures)
            listener.fill_leaf(0, self._changes())
            losses.extend(found[leaf] for leaf, _ in share)
        finally:
            self._parameters.refresh()

    def _open_shards(
        self, servers: int, rule: UpdateRule, before: Adaptation, step: int, is_replay: bool
    ) -> None:
        """Let the shards of this rank begin the step; if it is computed again, all shards."""
        if len(self._indices) != servers:
            self._indices, self._shards = parameters_by_server(self._sizes, servers), {}
        rate = self._user.learning_rate(self._config.train, step)
        for server in range(servers) if is_replay else (self._engine.groups.control.rank,):
            indices = self._indices[server]
            if server not in self._shards:
                found = self._config, self._parameters, indices, self._user
                self._shards[server] = _ServedShard(*found)
            self._shards[server].begin(self._state_of(indices), rule, before, rate)

    def _state_of(self, indices: Sequence[int]) -> list[Tensor]:
        """The part of the run's state that a server has, in its order."""
        slots = self._engine.optimizer.slots
        kept = [slot.tensors[i] for slot in slots for i in indices]
        weights = [self._parameters.master_tensors[i] for i in indices]
        return [*weights, *(tensor for tensor in kept if tensor is not None)]

    def _size_of(self, indices: Sequence[int]) -> ShardSize:
        weights = sum(self._sizes[i] for i in indices)
        return ShardSize(weights, sum(t.numel() for t in self._state_of(indices)), len(indices))

    def _exchange(
        self,
        shares: Shares,
        rule: UpdateRule,
        batches: Mapping[int, Any],
        found: dict[int, Tensor],
        listener: GradientListener,
    ) -> list[ServerRecord]:
        control = self._engine.groups.control
        sizes, dtype = list(map(self._size_of, self._indices)), self._inner.gradients()[0].dtype
        exchange = ServerStep(control, shares, rule, self._shards[control.rank], sizes, dtype)
        self._step = exchange
        try:
            for microbatch in exchange.order:
                weights = exchange.weights()
                if weights is not None:
                    self._compute_with(weights)
                begun = time.perf_counter()
                weight, gradients = self._gradients(batches[microbatch], microbatch, found)
                seconds = time.perf_counter() - begun
                exchange.push(microbatch, weight, gradients, seconds)
                listener.check()
                self.on_progress()
            self._finals, records = exchange.finish()
        except BaseException:
            exchange.give_up()
            raise
        return records

    def _gradients(
        self, batch: Any, microbatch: int, found: dict[int, Tensor]
    ) -> tuple[float, list[Tensor]]:
        """Run the passes of a microbatch on the present weights. Return its tokens, and its mean
        gradient by server, clipped."""
        losses: list[Tensor] = []
        self._inner.begin(1, ((0,),))
        self._passes.train([(0, batch)], self._inner, losses)
        self._inner.finish()
        found[microbatch] = losses[0]
        tokens = float((batch.targets != IGNORED_TARGET).sum())
        norm = sqrt(self._inner.squared_norm()) / (tokens or 1.0)
        factor = clip_factor(norm, self._config.train.optimizer.clip_norm) / (tokens or 1.0)
        gradients = self._inner.gradients()
        return tokens, [
            _flat([gradients[i] for i in indices]).mul_(factor) for indices in self._indices
        ]

    @torch.no_grad()
    def _compute_with(self, weights: Sequence[Tensor]) -> None:
        """weights: by server, [n]"""
        computed = self._parameters.compute_tensors
        for indices, flat in zip(self._indices, weights, strict=True):
            into = [computed[i] for i in indices]
            for tensor, part in zip(
                into, torch.split(flat, [t.numel() for t in into]), strict=True
            ):
                tensor.copy_(part.view(tensor.shape))

    @torch.no_grad()
    def _changes(self) -> list[Tensor]:
        """What the step has taken off the weights."""
        changes = [torch.empty(0)] * len(self._sizes)
        masters = self._parameters.master_tensors
        for indices, final in zip(self._indices, self._finals, strict=True):
            sizes = [self._sizes[i] for i in indices]
            parts = torch.split(final[: sum(sizes)], sizes)
            for index, part in zip(indices, parts, strict=True):
                new = part.view(masters[index].shape).to(masters[index].device)
                changes[index] = masters[index] - new
        return changes

    def _mean_squares(
        self, squares: Sequence[Sequence[float]], rule: UpdateRule
    ) -> tuple[float, float]:
        """Mean squared norms of microbatches and of updates. They are summed in the order of the
        parameters, so the number of servers changes no bit."""
        small, large = dict[int, float](), dict[int, float]()
        for indices, own in zip(self._indices, squares, strict=True):
            small.update(zip(indices, own[: len(indices)], strict=True))
            large.update(zip(indices, own[len(indices) :], strict=True))
        order = range(len(self._sizes))
        return (
            sum(small[i] for i in order) / rule.microbatches,
            sum(large[i] for i in order) / rule.updates,
        )

    # --- a step again ---------------------------------------------------------------------
    def _replay(
        self,
        recorded: ServerUpdates,
        rule: UpdateRule,
        before: Adaptation,
        batches: Mapping[int, Any],
        found: dict[int, Tensor],
        listener: GradientListener,
    ) -> None:
        """Compute a step as the servers have recorded it. Raises DataError for a record that no
        run can have written."""
        servers = range(len(self._indices))
        rows = [[_Row(before, *row) for row in own] for own in recorded.updates]
        wanted = {(s, row.base) for s in servers for row in rows[s]}
        bases = {(s, row.microbatch): row.base for s in servers for row in rows[s]}
        versions, done = [0] * len(servers), [0] * len(servers)
        kept: dict[tuple[int, int], Tensor] = {}
        pushes: dict[int, tuple[float, list[Tensor]]] = {}
        waiting = sorted(batches)
        empty = torch.empty(0)

        def keep(server: int) -> None:
            if (server, versions[server]) in wanted:
                kept[server, versions[server]] = self._shards[server].weights()

        for server in servers:
            keep(server)
        width = rule.width if rule.is_synchronous else 1
        while waiting or any(done[s] < len(rows[s]) for s in servers):
            progress = False
            for j in list(waiting):
                needed = [(s, bases[s, j]) for s in servers if rows[s]]
                if all(key in kept for key in needed):
                    weights = [kept[s, bases[s, j]] if rows[s] else empty for s in servers]
                    self._compute_with(weights)
                    pushes[j] = self._gradients(batches[j], j, found)
                    waiting.remove(j)
                    listener.check()
                    self.on_progress()
                    progress = True
            for s in servers:
                due = rows[s][done[s] : done[s] + width]
                while due and all(row.microbatch in pushes for row in due):
                    ready = [(row.microbatch, *pushes[row.microbatch]) for row in due]
                    gradients = [Push(j, weight, parts[s]) for j, weight, parts in ready]
                    self._shards[s].apply(gradients, versions[s], due[0].staleness)
                    versions[s] += 1
                    done[s] += width
                    keep(s)
                    due = rows[s][done[s] : done[s] + width]
                    progress = True
            if not progress:
                raise DataError(
                    f"the recorded updates of step {recorded.step} wait for each other",
                    where="server_updates in the journal",
                    remedy="take the journal from another copy of the run",
                )
        self._finals = [self._shards[s].final() for s in servers]

    def _describe(
        self,
        step: int,
        before: Adaptation,
        rule: UpdateRule,
        shares: Shares,
        records: Sequence[ServerRecord],
        straggling: float,
    ) -> ServerUpdates:
        owner = {leaf: rank for rank, share in enumerate(shares) for leaf in share}
        width = rule.width if rule.is_synchronous else 1
        updates = [
            [
                [
                    before.updates + at // width + 1,
                    owner[push.microbatch],
                    push.microbatch,
                    at // width - push.base if not rule.is_synchronous else 0,
                    int(push.weight),
                ]
                for at, push in enumerate(record.applied)
            ]
            for record in records
        ]
        return ServerUpdates(rule.is_synchronous, rule.width, updates, straggling, step=step)

    # --- what is kept ---------------------------------------------------------------------
    @property
    def adaptation(self) -> Adaptation:
        """What the next step is computed with."""
        return Adaptation.of_numbers(self._numbers.tolist())

    def events(self) -> list[Event]:
        """See `LearnerStates`; of the step that was applied last."""
        if self._event is None:
            return []
        found: list[Event] = [self._event]
        width, was = self._event.width, self._event.is_synchronous
        after = self.adaptation
        if (after.width, after.is_synchronous) != (width, was):
            measured = self._event.straggling, after.noise_scale
            found.append(
                UpdatesAdapted(after.is_synchronous, after.width, *measured, step=self._event.step)
            )
        return found

    def used_units(self, batches: Sequence[Any]) -> int:
        """See `LearnerStates`."""
        return sum(to_units(batch.tokens) for batch in batches)

    def divisor(self, tokens: float) -> float:
        """See `LearnerStates`: the change of a step is no sum."""
        return 1.0

    def open(self, step: int, gradients: GradientFeeder, optimizer: Optimizer) -> None:
        """See `LearnerStates`. A step updates all weights."""

    def rate(self, step: int) -> float:
        """See `LearnerStates`."""
        return self._user.learning_rate(self._config.train, step)

    @torch.no_grad()
    def commit(self) -> None:
        """See `LearnerStates`. The tensors that a checkpoint holds are overwritten only here."""
        for indices, final in zip(self._indices, self._finals, strict=True):
            state = self._state_of(indices)
            for tensor, part in zip(
                state, torch.split(final, [t.numel() for t in state]), strict=True
            ):
                tensor.copy_(part.view(tensor.shape))
        self._numbers.copy_(torch.tensor(self._next.numbers(), dtype=torch.float64))

    def reset(self) -> None:
        """See `LearnerStates`."""
        first = Adaptation.first(self._config.server)
        self._numbers.copy_(torch.tensor(first.numbers(), dtype=torch.float64))

    def state(self) -> list[LocalTensor]:
        """See `LearnerStates`."""
        return [LocalTensor(ADAPTATION_ROW.name, self._numbers, (0,), ADAPTATION_ROW.shape)]

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Any], on_progress: Callable[[], None]) -> list[Tensor]:
        """See `Executor`."""
        return self._passes.evaluate(batches, on_progress)


class _Row:
    """A row of `ServerUpdates.updates`, in numbers of its step."""

    def __init__(
        self, before: Adaptation, version: int, worker: int, microbatch: int, staleness: int, _: int
    ) -> None:
        self.microbatch, self.staleness = microbatch, staleness
        self.base = version - before.updates - 1 - staleness


def _checked(
    updates: Mapping[int, ServerUpdates], step: int, batches: Mapping[int, Any]
) -> ServerUpdates:
    """Return what the journal has of a step. Raises CorruptError if it has nothing, or nothing of
    these microbatches."""
    recorded = updates.get(step)
    if recorded is None:
        raise CorruptError("the journal has no server_updates of it")
    tokens = {j: int((batch.targets != IGNORED_TARGET).sum()) for j, batch in batches.items()}
    workers: dict[int, int] = {}
    for server, own in enumerate(recorded.updates):
        try:
            is_right = not own or sorted(row[2] for row in own) == sorted(tokens)
            for _, worker, j, _, read in own if is_right else ():
                is_known = worker in range(len(recorded.updates)) and tokens[j] == read
                is_right &= is_known and workers.setdefault(j, worker) == worker
        except (IndexError, TypeError, ValueError):
            is_right = False
        if not is_right:
            raise CorruptError(f"the server_updates of server {server} are not of its microbatches")
    if not workers:
        raise CorruptError("its server_updates have no rows")
    return recorded


def _shares_of(recorded: ServerUpdates) -> Shares:
    """The microbatches that each rank has computed."""
    rows = next(own for own in recorded.updates if own)
    shares: list[list[int]] = [[] for _ in recorded.updates]
    for _, worker, microbatch, _, _ in rows:
        shares[worker].append(microbatch)
    return tuple(tuple(sorted(share)) for share in shares)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """A copy in the host's memory. -> [n]"""
    if not tensors:
        return torch.empty(0)
    return torch.cat([tensor.reshape(-1).cpu() for tensor in tensors])
