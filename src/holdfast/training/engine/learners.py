"""Learners: a step of the run is a round, in which each learner trains apart for many inner steps.

This is DiLoCo (Douillard et al., 2023, algorithm 1). A learner is one logical microbatch of the
step, and its slice of the sample order is that of the microbatch. Its "gradient" is the change of
the weights in its inner steps. So dealing, tree, vote and recovery are those of any step. A round
has the same bits for any number of workers.

With `outer.overlap_steps` a learner gives its change before its last inner steps, as in Streaming
DiLoCo (Douillard et al., 2025, algorithm 2). The exchange runs while they compute. After the last
one the round is applied, and the learner mixes its weights with those of the run. So nothing is in
flight between two rounds, and a snapshot holds all there is.

The module computes with the weights of the learner whose turn it is. A checkpoint holds other
weights, which stay as they are until the round is applied. A round that fails anywhere has not
happened: the new state of its learners' optimizers is committed after the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.core.data.learner_fates import LearnerFate
from holdfast.core.sharding.fragments import fragment_of
from holdfast.core.sharding.optimizer_state import slot_prefix
from holdfast.core.sharding.reduction_tree import Shares
from holdfast.core.sharding.state_table import (
    ERROR_PREFIX,
    LATE_PREFIX,
    LEARNER_PREFIX,
    WEIGHTS_PREFIX,
    learner_shares,
)
from holdfast.core.sharding.step_resume import Computed
from holdfast.core.weights import to_units
from holdfast.data.stream.loader import TensorMicrobatch
from holdfast.events import Event
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.parallel.axes.replicated import ReplicatedGradients
from holdfast.parallel.gradients.feeder import GradientFeeder
from holdfast.parallel.gradients.grad_norm import clip_factor
from holdfast.parallel.outer.codecs import Codec, make_codec
from holdfast.parallel.outer.payloads import PayloadRound
from holdfast.parallel.outer.rules import combine, rda
from holdfast.training.engine.executors import Executor, Share
from holdfast.training.engine.fragments import FragmentGradients
from holdfast.training.engine.objective import IGNORED_TARGET
from holdfast.training.engine.stage_work import GradientListener
from holdfast.training.engine.state import LocalTensor, Parameters
from holdfast.training.engine.step_status import PhaseTimer
from holdfast.training.optimizers.make_optimizer import UserParts, make_optimizer
from holdfast.training.optimizers.optimizer import Optimizer
from holdfast.training.optimizers.torch_optimizer import OptimizerParts

LearnerSlots = list[list[Tensor | None]]
"""By slot and parameter: [learners of this rank, *shape]; None where the parameter has none. With
error feedback, the last slot is what was left out."""


class LearnerExecutor(Executor):
    """Runs the rounds of the learners of one rank, one after the other.

    passes: runs the passes of an inner step. inner: sums its gradients, on this rank alone.
    parameters: what the run has of the weights; the module computes on tensors of its own. working:
    what a learner updates: those tensors, or in mixed precision copies of theirs in fp32. step: the
    round that is open. Its `commit` and `state` are those of `LearnerStates`.
    """

    applies_update = False

    def __init__(
        self,
        config: RunConfig,
        groups: ProcessGroups,
        passes: Executor,
        inner: ReplicatedGradients,
        parameters: Parameters,
        working: Sequence[Tensor],
        user: UserParts,
    ) -> None:
        super().__init__(passes.arguments)
        self._passes, self._inner, self._parameters = passes, inner, parameters
        self._working, self._user, self._train = list(working), user, config.inner_train
        self._outer, self._every = config.outer, config.outer.inner_steps
        self._before = self._every - config.outer.overlap_steps  # inner steps before a change
        self._learners = config.outer.learners
        self.counts_alike = config.outer.average != "token_weighted"
        self._rule = "" if config.outer.is_sum else config.outer.average
        self._faulty = config.outer.faulty
        self.fates: Sequence[LearnerFate] = ()
        self.step: Callable[[], int] = lambda: 1
        self.on_progress: Callable[[], None] = lambda: None
        self._groups = groups
        self._shares = learner_shares(self._learners, groups.replica_count)
        self._own = self._shares[groups.coordinate.replica]
        codec = config.outer.codec
        self._codec: Codec | None = None
        if config.outer.sends_all:
            shapes = [tuple(tensor.shape) for tensor in self._working]
            self._codec = make_codec(codec.name, codec.share, shapes, codec.rank)
        self._feedback = codec.error_feedback
        kept = (parameters.table, self._working, inner.gradients(), user, None, parameters.boxes)
        self._optimizer = make_optimizer(config.train.optimizer, *kept)
        like: list[Sequence[Tensor | None]] = [slot.tensors for slot in self._optimizer.slots]
        self._prefixes = [slot_prefix(slot.slot) for slot in self._optimizer.slots]
        if codec.keeps_error:
            like.append(self._working)
            self._prefixes.append(ERROR_PREFIX)
        fragments = config.outer.fragments
        self._alpha = config.outer.overlap_alpha if config.outer.overlap_steps else 0.0
        of = fragment_of(parameters.table, fragments)
        numbers = [of[row.name] for row in parameters.table]
        self._fragments = [
            [i for i, number in enumerate(numbers) if number == fragment]
            for fragment in range(fragments)
        ]
        self._open = self._fragments[0]  # parameters that the open round exchanges
        if config.outer.keeps_weights:
            like.append(self._working)
            self._prefixes.append(WEIGHTS_PREFIX)
        if config.outer.keeps_late:
            like.append(self._working)
            self._prefixes.append(LATE_PREFIX)
        self._like = like
        count = len(self._own)
        self._states = self._make_states(like, count)
        self._next_states = self._make_states(like, count)
        self.times = PhaseTimer()  # of a round: inner, codec, give, wait

    def _make_states(self, like: Sequence[Sequence[Tensor | None]], count: int) -> LearnerSlots:
        """Zeros of the states of so many learners."""
        return [
            [None if t is None else t.new_zeros((count, *t.shape)) for t in tensors]
            for tensors in like
        ]

    def _kept(self, prefix: str, states: LearnerSlots) -> list[Tensor] | None:
        """What `states` have of every parameter under a prefix: [learners of this rank, *shape].
        None: the run keeps no such thing."""
        if prefix not in self._prefixes:
            return None
        found = [state for state in states[self._prefixes.index(prefix)] if state is not None]
        assert len(found) == len(self._working), "every parameter has one"
        return found

    # --- a round --------------------------------------------------------------------------
    def open(self, step: int, gradients: GradientFeeder, optimizer: Optimizer) -> None:
        """See `LearnerStates`. With fragments, a round exchanges one of them."""
        number = (step - 1) % len(self._fragments)
        self._open = self._fragments[number]
        if isinstance(gradients, FragmentGradients):
            assert isinstance(optimizer, OptimizerParts), "the outer optimizer is SGD"
            gradients.open_fragment(number, self._open)
            optimizer.only = frozenset(self._open)

    def _of_open(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of the parameters that the open round exchanges."""
        return [tensors[index] for index in self._open]

    def train(self, share: Share, listener: GradientListener, losses: list[Tensor]) -> None:
        """Run the round of each learner. Its loss is the sum over all its inner steps."""
        codec, exchange = self._codec, None
        count = sum(t.numel() for t in self._of_open(self._working))
        if codec is not None and isinstance(listener, GradientsOfAll):
            size = codec.payload_bytes(count)
            exchange = PayloadRound(self._groups.control, self._shares, size)
        try:
            self.times.start()
            for learner, batch in share:
                send = partial(self._send_change, learner, batch.tokens, listener, exchange)
                losses.append(self._run_round(learner, batch, listener, send)[0])
                self.times.lap("inner")
                listener.check()
        finally:
            self._parameters.refresh()
        if codec is not None and exchange is not None:
            payloads, device = exchange.wait_for_all(), self._working[0].device
            self.times.lap("wait")
            found = [codec.decode(payloads[k].to(device), count) for k in range(self._learners)]
            self.times.lap("codec")
            found = self._admit(payloads, found, listener)
            for learner, flat in enumerate(self._combined(found)):
                self._give(learner, self._split(flat), listener)
            self.times.lap("give")

    def _send_change(
        self, learner: int, tokens: float, listener: GradientListener, exchange: PayloadRound | None
    ) -> None:
        """Let the change of a learner begin to travel; it returns at once. tokens: of the round."""
        self.times.lap("inner")
        changes = self._changes(tokens)
        if self._codec is None or exchange is None:
            self._give(learner, changes, listener)
            self.times.lap("give")
        else:
            exchange.send(learner, self._encode(learner, changes, self._codec))
            self.times.lap("codec")

    def _admit(
        self, payloads: dict[int, Tensor], changes: list[Tensor], listener: GradientListener
    ) -> list[Tensor]:
        """The changes that count, of the decoded payloads of all learners."""
        return changes

    def _combined(self, changes: list[Tensor]) -> list[Tensor]:
        """The summands of the learners, whose sum is divided by their number. A rule makes one of
        all: the remaining ones are zeros."""
        if not self._rule:
            return changes
        if self._rule == "rda":
            sizes = [tensor.numel() for tensor in self._of_open(self._working)]
            names = enumerate(self._parameters.table[index].name for index in self._open)
            embeddings = {place for place, name in names if name.startswith("embed.")}
            result = rda(torch.stack(changes), sizes, embeddings)
        else:
            result = combine(self._rule, torch.stack(changes), self._faulty)
        result.mul_(self._learners)
        return [result, *(torch.zeros_like(result) for _ in changes[1:])]

    @torch.no_grad()
    def _changes(self, tokens: float) -> list[Tensor]:
        """What the inner steps have taken off the weights, with the weight of the learner. tokens:
        that it read."""
        weight = 1.0 if self.counts_alike else float(tokens)
        masters = self._of_open(self._parameters.master_tensors)
        return [
            torch.sub(old, new).mul_(weight)
            for old, new in zip(masters, self._of_open(self._working), strict=True)
        ]

    @torch.no_grad()
    def _give(self, learner: int, changes: Sequence[Tensor], listener: GradientListener) -> None:
        if isinstance(listener, ReplicatedGradients):
            listener.fill_leaf(learner, changes)
            return
        listener.start_leaf(learner)
        for parameter, change in zip(self._of_open(self._inner.parameters), changes, strict=True):
            listener.give(parameter, change.to(parameter.dtype))
        listener.end_leaf()

    @torch.no_grad()
    def _encode(self, learner: int, changes: Sequence[Tensor], codec: Codec) -> Tensor:
        """The payload of a learner, and what it leaves out for the learner's next round."""
        row, flat = self._own.index(learner), flat_of(changes)
        errors = self._kept(ERROR_PREFIX, self._states)
        if errors is not None:
            left = [error[row] for error in self._of_open(errors)]
            flat.add_(flat_of(left), alpha=self._feedback)
        payload = codec.encode(flat)
        if (errors := self._kept(ERROR_PREFIX, self._next_states)) is not None:
            parts = self._split(flat - codec.decode(payload, flat.numel()))
            for error, part in zip(self._of_open(errors), parts, strict=True):
                error[row].copy_(part)
        return payload.cpu()

    def _split(self, flat: Tensor) -> list[Tensor]:
        """[n] fp32 -> a tensor for each parameter that the round exchanges"""
        like = self._of_open(self._working)
        parts = torch.split(flat, [t.numel() for t in like])
        return [part.view(t.shape).to(t.dtype) for part, t in zip(parts, like, strict=True)]

    def _stops(self, learner: int, steps: int) -> bool:
        """Return True if a learner begins no further inner step of the round after `steps`."""
        return False

    def _run_round(
        self,
        learner: int,
        batch: Any,
        listener: GradientListener,
        send_change: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, int]:
        """The inner steps of a learner. Returns the sum of their losses, and how many it did.
        send_change: called after the inner steps that are part of the change."""
        row = self._own.index(learner)
        self._begin_learner(row)
        size = len(batch.inputs) // self._every
        total = torch.zeros((), device=self._working[0].device)
        first = (self.step() - 1) * self._every + 1
        steps = 0
        while steps < self._every and not self._stops(learner, steps):
            samples = rows_of(batch, steps * size, (steps + 1) * size)
            loss = self._run_inner_step(first + steps, samples)
            steps += 1
            total = loss if steps == 1 else total + loss
            if steps == self._before:
                send_change()
            listener.check()
            self.on_progress()
        self._end_learner(row)
        return total, steps

    def _run_inner_step(self, number: int, samples: Any) -> Tensor:
        """Inner step `number` of the run, counted from 1. Returns its sum of losses."""
        parts = self._cut(samples)
        losses: list[Tensor] = []
        self._inner.begin(len(parts), (tuple(range(len(parts))),))
        self._passes.train(list(enumerate(parts)), self._inner, losses)
        self._inner.finish()
        tokens = float((samples.targets != IGNORED_TARGET).sum()) or 1.0
        norm = sqrt(self._inner.squared_norm()) / tokens
        clip = clip_factor(norm, self._train.optimizer.clip_norm)
        rate = self._user.learning_rate(self._train, number)
        self._optimizer.apply(number, rate, tokens / clip, len(parts))
        self._update_compute_tensors()
        return torch.stack(losses).sum(0)

    def _cut(self, samples: Any) -> list[Any]:
        """Samples as the passes take them."""
        count, size = len(samples.inputs), self._train.microbatch_size
        return [rows_of(samples, at, min(at + size, count)) for at in range(0, count, size)]

    @torch.no_grad()
    def _update_compute_tensors(self) -> None:
        computed = self._parameters.compute_tensors
        if computed[0] is not self._working[0]:
            torch._foreach_copy_(computed, self._working)

    @torch.no_grad()
    def _begin_learner(self, row: int) -> None:
        own = self._kept(WEIGHTS_PREFIX, self._states)
        begin = self._parameters.master_tensors if own is None else [t[row] for t in own]
        torch._foreach_copy_(self._working, begin)
        self._update_compute_tensors()
        for slot, states in zip(self._optimizer.slots, self._states, strict=False):
            for tensor, state in zip(slot.tensors, states, strict=True):
                if tensor is not None and state is not None:
                    tensor.copy_(state[row])

    @torch.no_grad()
    def _end_learner(self, row: int) -> None:
        for slot, states in zip(self._optimizer.slots, self._next_states, strict=False):
            for tensor, state in zip(slot.tensors, states, strict=True):
                if tensor is not None and state is not None:
                    state[row].copy_(tensor)
        if (own := self._kept(WEIGHTS_PREFIX, self._next_states)) is not None:
            torch._foreach_copy_([t[row] for t in own], self._working)

    @torch.no_grad()
    def _keep_state(self, row: int, only: str = "") -> None:
        """Let a learner that does not count be as before the round. only: in what is under this
        prefix; "": in all."""
        for prefix, states, new in zip(
            self._prefixes, self._states, self._next_states, strict=True
        ):
            if only and prefix != only:
                continue
            for state, value in zip(states, new, strict=True):
                if state is not None and value is not None:
                    value[row].copy_(state[row])

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Any], on_progress: Callable[[], None]) -> list[Tensor]:
        """The losses of each microbatch, which is that of a round: so it is cut for the passes."""
        losses = []
        for batch in batches:
            parts = self._passes.evaluate(self._cut(batch), on_progress)
            losses.append(torch.stack(parts).sum(0))
        return losses

    # --- what is kept ---------------------------------------------------------------------
    def rate(self, step: int) -> float:
        """See `LearnerStates`."""
        return self._user.learning_rate(self._train, step * self._every)

    def used_units(self, batches: Sequence[Any]) -> int:
        """See `LearnerStates`."""
        return sum(to_units(batch.tokens) for batch in batches)

    def divisor(self, tokens: float) -> float:
        """See `LearnerStates`."""
        return self._learners if self.counts_alike else tokens or 1

    @torch.no_grad()
    def commit(self) -> None:
        """See `LearnerStates`. The tensors that a checkpoint holds are overwritten only here."""
        pairs = zip(self._prefixes, self._states, self._next_states, strict=True)
        for prefix, states, new in pairs:
            for index, (state, value) in enumerate(zip(states, new, strict=True)):
                is_new = prefix != ERROR_PREFIX or index in self._open
                if is_new and state is not None and value is not None:
                    state.copy_(value)
        if (own := self._kept(WEIGHTS_PREFIX, self._states)) is not None:
            masters = self._of_open(self._parameters.master_tensors)
            _mix(self._of_open(own), masters, self._alpha)

    @torch.no_grad()
    def reset(self) -> None:
        """See `LearnerStates`."""
        for state in (state for states in self._states for state in states):
            if state is not None:
                state.zero_()
        if (own := self._kept(WEIGHTS_PREFIX, self._states)) is not None:
            _mix(own, self._parameters.master_tensors, 0.0)

    def events(self) -> list[Event]:
        """See `LearnerStates`: the loop tells of rounds."""
        return []

    def state(self) -> list[LocalTensor]:
        """See `LearnerStates`; in the order of the state table."""
        first = self._own[0] if self._own else 0
        return [
            LocalTensor(
                f"{LEARNER_PREFIX}{prefix}{row.name}",
                state,
                (first, *(0 for _ in state.shape[1:])),
                (self._learners, *state.shape[1:]),
            )
            for prefix, states in zip(self._prefixes, self._states, strict=True)
            for row, state in zip(self._parameters.table, states, strict=True)
            if state is not None
        ]


class GradientsOfAll(ReplicatedGradients):
    """Sums the decoded changes of all learners, which every rank has, on this rank alone."""

    def begin(self, leaves: int, shares: Shares, computed: Computed = ()) -> None:
        """Start a round. shares: of the ranks, which make no difference here."""
        super().begin(leaves, (tuple(range(leaves)),))


class FragmentsOfAll(FragmentGradients, GradientsOfAll):
    """The same, of one fragment."""


def _mix(kept: Sequence[Tensor], tensors: Sequence[Tensor], alpha: float) -> None:
    """Let all learners keep so much of their values, and take the rest from the same tensors. kept:
    [learners, *shape]"""
    for state, tensor in zip(kept, tensors, strict=True):
        if not alpha:
            state.copy_(tensor.expand_as(state))
            continue
        # In two operations: a fused one rounds the last elements otherwise, and which ones these
        # are depends on the number of learners here.
        state.mul_(alpha).add_(tensor * (1 - alpha))


def flat_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the values of all tensors, one after the other: [n] fp32"""
    return torch.cat([tensor.reshape(-1).to(torch.float32) for tensor in tensors])


def rows_of(batch: TensorMicrobatch, start: int, stop: int) -> TensorMicrobatch:
    """Return some of the samples of a microbatch, as views."""
    return replace(
        batch,
        inputs=batch.inputs[start:stop],
        targets=batch.targets[start:stop],
        documents=None if batch.documents is None else batch.documents[start:stop],
        side={name: rows[start:stop] for name, rows in batch.side.items()},
    )
