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
from holdfast.parallel.norm import clip_factor, sum_of_squares
from holdfast.parallel.reducer import Reducer
from holdfast.parallel.torch_compat import is_peer_loss
from holdfast.spec.order import BatchSchedule
from holdfast.spec.rates import learning_rate
from holdfast.spec.tree import ReductionTree, Shares, deal
from holdfast.train.diagnose import find_non_finite
from holdfast.train.optimizer import AdamW
from holdfast.train.state import LocalTensor, Parameters, Read, load_state, state_tensors
from holdfast.train.vote import Ballot, Verdict, Wishes, vote

Dealer = Callable[[int, int], Shares]
"""(microbatches of a step, replicas) -> who computes which."""


class Microbatch(Protocol):
    """What the engine reads of one microbatch (its part, where samples are split over shards)."""

    @property
    def inputs(self) -> Tensor: ...

    @property
    def targets(self) -> Tensor: ...

    @property
    def documents(self) -> Tensor | None: ...

    @property
    def tokens(self) -> int: ...


class Gradients(Protocol):
    """Feeds the reducer: `ReplicatedGradients` or `ShardedGradients`."""

    @property
    def reducer(self) -> Reducer: ...

    def start_leaf(self, leaf: int) -> None: ...

    def end_leaf(self) -> None: ...

    def gradients(self) -> list[Tensor]: ...


class StepEngine:
    """Data parallel training of one model on one rank, replicated or sharded.

    objective: module from (inputs, targets, documents) to a scalar loss sum.
    dealer: who computes which microbatch; every rank must be given the same.
    """

    def __init__(
        self, objective: nn.Module, parameters: Parameters, gradients: Gradients, groups: Groups,
        train: TrainConfig, dealer: Dealer = deal,
    ):  # fmt: skip
        self.objective, self.parameters, self.groups = objective, parameters, groups
        self.train = train
        self._gradients, self._reducer = gradients, gradients.reducer
        self._device = gradients.reducer.gradient.device
        self._dealer = dealer
        self._schedule = BatchSchedule(
            train.batch_size, [(s.from_step, s.batch_size) for s in train.batch_warmup]
        )
        decays = [row.decay for row in parameters.table]
        self.optimizer = AdamW(parameters.held, gradients.gradients(), decays, train.optimizer)
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
        self._reducer.begin(self.leaves(step), self._shares)
        return self._shares[self.groups.coordinate.replica]

    def compute(self, batches: Sequence[Microbatch]) -> None:
        """Forward and backward of my share, in its order. Raises PeerLostError."""
        share = self._shares[self.groups.coordinate.replica]
        self._batches = list(batches)
        try:
            for leaf, batch in zip(share, batches, strict=True):
                self._gradients.start_leaf(leaf)
                loss = self.objective(batch.inputs, batch.targets, batch.documents)
                loss.backward()
                self._gradients.end_leaf()
                self._losses.append(loss.detach())
                self._reducer.check()
            if self._device.type != "cpu":  # else its work would count as the next phase's
                torch.accelerator.synchronize(self._device)
        except PeerLostError:
            self.groups.abort()  # wakes ranks that wait for this one in another group
            raise
        except RuntimeError as error:
            self._reducer.fail(error)
            raise self._lost(error) from error

    def reduce(self, wishes: Wishes | None = None) -> Verdict:
        """Wait for the whole gradient and vote.

        Raises PeerLostError, and NonFiniteError on every rank alike when a loss or a gradient
        anywhere is NaN or infinite; parameters are untouched then.
        """
        try:
            self._reducer.finish()
        except PeerLostError:
            self.groups.abort()
            raise
        squares = float(sum_of_squares(self._reducer.gradient))
        ballot = Ballot(
            tokens=sum(batch.tokens for batch in self._batches),
            squares=squares,
            losses=tuple(float(loss) for loss in self._losses),
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
            self.objective, self.groups, [row.name for row in self.parameters.table],
            list(zip(share, self._batches, strict=True)),
        )  # fmt: skip
        return NonFiniteError(self._step, rank, name)
