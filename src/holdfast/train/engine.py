"""The step engine: what one rank does in one step, in five calls.

    begin(N)          open the reduction of step N; returns my share of its microbatches
    compute(batches)  forward and backward of each; gradients leave while the backward goes on
    reduce(wishes)    finish the sum, take its norm, vote
    apply(verdict)    divide once by the global token count, clip, update
    state(), load()   what a checkpoint holds

Nothing before `apply` changes a parameter, so a step that fails anywhere has not happened.
A runner drives the calls; the engine knows nothing of clocks, journals or checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from holdfast.config.train import TrainConfig
from holdfast.errors import NonFiniteError, PeerLostError
from holdfast.parallel.groups import Groups
from holdfast.parallel.norm import clip_factor
from holdfast.parallel.torch_compat import is_peer_loss
from holdfast.spec.order import BatchSchedule
from holdfast.spec.rates import learning_rate
from holdfast.spec.tree import ReductionTree, Shares, deal
from holdfast.train.diagnose import find_non_finite
from holdfast.train.execute import Executor, Inputs, Listener
from holdfast.train.optimizer import AdamW
from holdfast.train.state import LocalTensor, Parameters, Read, load_state, state_tensors
from holdfast.train.vote import Ballot, Verdict, Wishes, speaks, vote

Dealer = Callable[[int, int], Shares]
"""(microbatches of a step, replicas) -> who computes which."""


class Microbatch(Inputs, Protocol):
    """What the engine reads of one microbatch (its part, where samples are split over shards)."""

    @property
    def tokens(self) -> int: ...


class Gradients(Listener, Protocol):
    """Sums gradients over whoever holds the same parameters: `ReplicatedGradients` and its kin."""

    def begin(self, leaves: int, shares: Shares) -> None: ...

    def fail(self, error: Exception) -> None: ...

    def finish(self) -> None: ...

    def squares(self) -> float: ...

    def gradients(self) -> list[Tensor]: ...


class StepEngine:
    """Training of one model on one rank, whatever the rank's part of it is.

    objective: module from (inputs, targets, documents) to a scalar loss sum, or a stage of it.
    executor: runs its passes. dealer: who computes which microbatch; every rank must be given
    the same.
    applied: the newest step whose update was made by this engine; None before the first.
    """

    def __init__(
        self, objective: nn.Module, executor: Executor, parameters: Parameters,
        gradients: Gradients, groups: Groups, train: TrainConfig, device: torch.device,
        dealer: Dealer = deal,
    ):  # fmt: skip
        self.objective, self.executor = objective, executor
        self.parameters, self.groups = parameters, groups
        self.train = train
        self._gradients, self._device = gradients, device
        self._dealer = dealer
        self._schedule = BatchSchedule(
            train.batch_size, [(s.from_step, s.batch_size) for s in train.batch_warmup]
        )
        decays = [row.decay for row in parameters.table]
        self.optimizer = AdamW(parameters.held, gradients.gradients(), decays, train.optimizer)
        self._speaks = speaks(groups.replica, groups.coordinate)
        self.applied: int | None = None
        self._step = 0
        self._shares: Shares = ()
        self._batches: list[Microbatch] = []
        self._losses: list[Tensor] = []

    # --- the plan of a step ---------------------------------------------------------------
    def leaves(self, step: int) -> int:
        """Logical microbatches of a step."""
        return self._schedule.size(step) // self.train.microbatch_size

    def samples(self, step: int) -> int:
        """Samples of a step's global batch."""
        return self._schedule.size(step)

    def shares(self, step: int) -> Shares:
        """Who computes which microbatch of a step, replica by replica, each in rising order."""
        dealt = self._dealer(self.leaves(step), self.groups.replicas)
        return tuple(tuple(sorted(share)) for share in dealt)

    def share(self, step: int) -> tuple[int, ...]:
        """The microbatches of a step that this rank's replica computes."""
        return self.shares(step)[self.groups.coordinate.replica]

    # --- a step ---------------------------------------------------------------------------
    def begin(self, step: int) -> tuple[int, ...]:
        """Open step `step` and return my share. Raises PeerLostError."""
        self._step, self._shares = step, self.shares(step)
        self._batches, self._losses = [], []
        try:
            self._gradients.begin(self.leaves(step), self._shares)
        except PeerLostError:
            self.groups.abort()
            raise
        return self._shares[self.groups.coordinate.replica]

    def compute(self, batches: Sequence[Microbatch]) -> None:
        """Forward and backward of my share, in its order. Raises PeerLostError."""
        share = self._shares[self.groups.coordinate.replica]
        self._batches = list(batches)
        try:
            self._losses = self.executor.train(share, self._batches, self._gradients)
            if self._device.type != "cpu":  # else its work would count as the next phase's
                torch.accelerator.synchronize(self._device)
        except PeerLostError:
            self.groups.abort()  # wakes ranks that wait for this one in another group
            raise
        except RuntimeError as error:
            self._gradients.fail(error)
            raise self._lost(error) from error

    def reduce(self, wishes: Wishes | None = None) -> Verdict:
        """Wait for the whole gradient and vote.

        Raises PeerLostError, and NonFiniteError on every rank alike when a loss or a gradient
        anywhere is NaN or infinite; parameters are untouched then.
        """
        try:
            self._gradients.finish()
        except PeerLostError:
            self.groups.abort()
            raise
        ballot = Ballot(
            tokens=sum(batch.tokens for batch in self._batches),
            squares=self._gradients.squares(),
            losses=tuple(float(loss) for loss in self._losses) if self._speaks else (),
            wishes=wishes or Wishes(),
        )
        tree = ReductionTree(self.leaves(self._step))
        verdict = vote(self.groups, tree, self._shares, ballot)
        if not verdict.finite:
            raise self._non_finite()
        return verdict

    def apply(self, verdict: Verdict) -> float:
        """Update the parameters; returns the learning rate that was used."""
        rate = learning_rate(self.train, self._step)
        clip = clip_factor(verdict.mean_norm, self.train.optimizer.clip_norm)
        self.optimizer.apply(self._step, rate, max(verdict.tokens, 1) / clip)
        self.applied = self._step  # the state is that of this step, even if refreshing fails
        self.parameters.refresh()
        self._batches, self._losses = [], []
        return rate

    # --- state ----------------------------------------------------------------------------
    def state(self) -> list[LocalTensor]:
        """Everything that a checkpoint must hold of this rank; the same storage every time."""
        return state_tensors(self.parameters, self.optimizer.exp_avg, self.optimizer.exp_avg_sq)

    def load(self, read: Read) -> None:
        """Fill the state in place from a reader of boxes."""
        load_state(self.state(), read)
        self.parameters.refresh()

    def initialise(self, seed: int) -> None:
        """Initial weights, and moments of zero."""
        self.parameters.initialise(seed)
        for moment in (*self.optimizer.exp_avg, *self.optimizer.exp_avg_sq):
            moment.zero_()

    def close(self) -> None:
        """Leave the groups in an orderly way."""
        self.groups.close()

    # --- what can go wrong ----------------------------------------------------------------
    def _lost(self, error: RuntimeError) -> Exception:
        if is_peer_loss(error):
            self.groups.abort()
            return PeerLostError(f"a peer was lost in step {self._step}: {error}")
        return error

    def _non_finite(self) -> NonFiniteError:
        """Compute my share again without reduction, and agree with all on where it began."""
        share = self._shares[self.groups.coordinate.replica]
        rank, name = find_non_finite(
            self.objective, self.executor, self.groups, self.parameters,
            list(zip(share, self._batches, strict=True)),
        )  # fmt: skip
        return NonFiniteError(self._step, rank, name)
