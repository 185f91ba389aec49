"""The step engine: what one rank does in one step, in five calls.

    begin(N)          open the reduction of step N; returns my share of its microbatches
    compute(batches)  forward and backward of each; gradients leave while the backward goes on
    reduce(wishes)    finish the sum, take its norm, vote
    apply(verdict)    divide once by the global token count, clip, update
    state(), load()   what a checkpoint holds

Nothing before `apply` changes a parameter, so a step that fails anywhere has not happened.
A runner drives the calls; the engine knows nothing of clocks, journals or checkpoints.

When a peer is lost, `held` describes what the engine still has. `recover.py` then finds the step
that all ranks resume from. If other ranks compute in lockstep with this one, a failure between
replicas is stored until all of them reach the end of `reduce`. It is raised on all or on none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor, nn

from holdfast.config.train import TrainConfig
from holdfast.core.data.sample_order import BatchSchedule
from holdfast.core.lr_schedule import learning_rate
from holdfast.core.sharding.reduction_tree import Shares, deal
from holdfast.core.sharding.step_resume import Computed, deal_away_from
from holdfast.errors import JumpError, NonFiniteError, PeerLostError
from holdfast.events import Evaluated
from holdfast.parallel.gradients.grad_norm import clip_factor
from holdfast.parallel.process_groups import ProcessGroups
from holdfast.parallel.torch_compat import is_peer_loss
from holdfast.policy.detection.loss_spikes import LossJump
from holdfast.policy.recovery.step_resolution import StepStage, advance
from holdfast.train.executors import Executor, GradientListener, Inputs
from holdfast.train.nonfinite import find_non_finite
from holdfast.train.optimizer import AdamW
from holdfast.train.state import LocalTensor, Parameters, ReadBox, load_state, state_tensors
from holdfast.train.vote import (
    AccountExchange,
    Ballot,
    StepAccount,
    StepVerdict,
    Wishes,
    meet_before_leaving,
    reports_losses,
    share_verdict,
    vote,
)

Dealer = Callable[[int, int], Shares]
"""(microbatches of a step, replicas) -> who computes which."""


class DeviceMicrobatch(Inputs, Protocol):
    """What the engine reads of one microbatch (its part, where samples are split over shards)."""

    @property
    def tokens(self) -> int: ...


class GradientReducer(GradientListener, Protocol):
    """Sums gradients over the ranks that hold the same parameters, as `ReplicatedGradients`."""

    defers_errors: bool

    @property
    def computed_leaves(self) -> tuple[int, ...]: ...

    @property
    def is_summed(self) -> bool: ...

    @property
    def is_finite(self) -> bool: ...

    def begin(self, leaves: int, shares: Shares, computed: Computed = ()) -> None: ...

    def keep(self, share: Sequence[int]) -> None: ...

    def fail(self, error: Exception) -> None: ...

    def finish(self) -> None: ...

    def squared_norm(self) -> float: ...

    def gradients(self) -> list[Tensor]: ...


GradientFeed = Callable[[ProcessGroups, GradientReducer | None], GradientReducer]
"""Returns the gradients' summation for the groups of a generation: the old one if it may stay."""


@dataclass(frozen=True)
class ResumedStep:
    """A step that continues: how it is dealt now, and what each replica has of it."""

    step: int
    shares: Shares
    computed: Computed


REMEMBERED_STEPS = 32
"""Steps whose numbers every rank remembers, so that any rank can report them without rank 0."""


@dataclass(frozen=True)
class StepProgress:
    """State of a stopped process, from which the next generation decides how to continue.

    applied_step: its state is that after this step; None: as it was loaded. `reduced_step`: the
    step after it, if its complete reduced gradient is here. has_all_votes: every vote for that step
    has arrived. is_torn: an update was interrupted, so that there is no state any more.
    is_replica_intact: the groups inside the replica can still be used.
    """

    applied_step: int | None
    reduced_step: int | None
    has_all_votes: bool
    is_torn: bool
    is_replica_intact: bool


class StepEngine:
    """Training of one model on one rank, whatever the rank's part of it is.

    objective: module from (inputs, targets, documents) to a scalar loss sum, or a stage of it.
    executor: runs its passes. dealer: who computes which microbatch; every rank must be given
    the same. feed: makes what sums gradients, for these groups and for later ones.
    applied_step: the newest step whose update was made by this engine; None before the first.
    is_torn: an update has begun and has not ended. first_step: the first step among the present
    replicas. verdict, account: of the newest step that has come so far; that of `verdict_step`.
    on_vote_sent: called when this rank's vote is on its way.
    judge_loss: is shown the account of a step before this rank votes; whether it has jumped, on the
    one rank that knows. loss_jump: what it found of the newest step.
    applied_verdicts: the last few steps that this process has applied, each with its verdict; a
    rebuilt session keeps them. unreported_step: a step that was applied and that no rank has
    reported yet. validated_step: the newest step up to which this rank knows that every validation
    was computed; None until it trains. last_validation: the newest one that it has computed itself.
    """

    def __init__(
        self,
        objective: nn.Module,
        executor: Executor,
        parameters: Parameters,
        feed: GradientFeed,
        groups: ProcessGroups,
        train: TrainConfig,
        device: torch.device,
        dealer: Dealer = deal,
    ):
        self.objective, self.executor = objective, executor
        self.parameters, self.groups = parameters, groups
        self.train = train
        self._feed, self._device = feed, device
        self.on_vote_sent: Callable[[], None] = lambda: None
        self.judge_loss: Callable[[int, StepAccount], LossJump | None] = lambda step, account: None
        self.loss_jump: LossJump | None = None
        self._gradients = feed(groups, None)
        self.dealer = dealer
        self._schedule = BatchSchedule(
            train.batch_size, [(s.from_step, s.batch_size) for s in train.batch_warmup]
        )
        decays = [row.decay for row in parameters.table]
        gradients = self._gradients.gradients()
        self.optimizer = AdamW(parameters.master_tensors, gradients, decays, train.optimizer)
        self.applied_step: int | None = None
        self.is_torn = False
        self.step_stage = StepStage.COMPUTING
        self.verdict: StepVerdict | None = None
        self.verdict_step = 0
        self.first_step = 0
        self.account: StepAccount | None = None
        self.applied_verdicts: deque[tuple[int, StepVerdict]] = deque(maxlen=REMEMBERED_STEPS)
        self.unreported_step = 0
        self.validated_step: int | None = None
        self.last_validation: Evaluated | None = None
        self._step = 0
        self._shares: Shares = ()
        self.batches: list[DeviceMicrobatch] = []  # of the step that is open, or was last
        self._accounts: AccountExchange | None = None
        self._losses: dict[int, Tensor] = {}  # of my share, if this rank receives them
        self._resumed_step: ResumedStep | None = None
        self._is_stopping = self._is_leaving = (
            False  # a parting rank does not wait inside its replica
        )
        self._on_groups_changed()

    def _on_groups_changed(self) -> None:
        """What follows from the groups."""
        self._reports_losses = reports_losses(self.groups.replica, self.groups.coordinate)
        self._gradients.defers_errors = self.groups.is_lockstep

    # --- the plan of a step ---------------------------------------------------------------
    def leaves(self, step: int) -> int:
        """Logical microbatches of a step."""
        return self._schedule.size(step) // self.train.microbatch_size

    def samples(self, step: int) -> int:
        """Samples of a step's global batch."""
        return self._schedule.size(step)

    def shares(self, step: int) -> Shares:
        """Return the microbatches that each replica computes in a step, each in rising order."""
        return self.share_function()(step)

    def share_function(self) -> Callable[[int], Shares]:
        """`shares`, as they are among the present replicas."""
        dealer, leaves, resumed = self.dealer, self.leaves, self._resumed_step
        replicas = self.groups.replica_count

        def shares(step: int) -> Shares:
            if resumed is not None and resumed.step == step:
                return resumed.shares
            return tuple(tuple(sorted(share)) for share in dealer(leaves(step), replicas))

        return shares

    def share(self, step: int) -> tuple[int, ...]:
        """The microbatches of a step that this rank's replica computes."""
        return self.shares(step)[self.groups.coordinate.replica]

    # --- a step ---------------------------------------------------------------------------
    def begin(self, step: int) -> tuple[int, ...]:
        """Open step `step` and return my share. Raises PeerLostError."""
        self.step_stage = advance(self.step_stage, StepStage.COMPUTING)
        if self.verdict_step == step:  # that verdict is of an attempt that no rank applied
            self.verdict, self.verdict_step = None, 0
        self._step, self._shares = step, self.shares(step)
        self.first_step = self.first_step or step
        self.batches, self._accounts = [], None
        computed = self._computed_by_replica(step)
        if not computed:
            self._losses = {}
        try:
            self._gradients.begin(self.leaves(step), self._shares, computed)
        except PeerLostError:
            self.groups.abort()
            raise
        if self._is_stopping:  # just before, and `begin` has forgotten it
            self._gradients.fail(_interrupted_error(step))
        return self._shares[self.groups.coordinate.replica]

    def compute(self, batches: Sequence[DeviceMicrobatch]) -> None:
        """Run forward and backward of my share, in its order. Skip the microbatches that were
        computed before the step was resumed. Raises PeerLostError."""
        replica = self.groups.coordinate.replica
        share, computed = self._shares[replica], self._computed_by_replica(self._step)
        self.batches = list(batches)
        todo = [
            (leaf, batch)
            for leaf, batch in zip(share, self.batches, strict=True)
            if not computed or leaf not in computed[replica]
        ]
        leaves, losses = [leaf for leaf, _ in todo], list[Tensor]()
        try:
            self.executor.train(leaves, [batch for _, batch in todo], self._gradients, losses)
            if self._device.type != "cpu":  # else its work would count as the next phase's
                torch.accelerator.synchronize(self._device)
        except Exception as error:
            self._gradients.fail(error)
            self.groups.abort()  # wakes ranks that wait for this one in another group
            if isinstance(error, RuntimeError) and is_peer_loss(error):
                raise PeerLostError(f"a peer was lost in step {self._step}: {error}") from error
            raise
        finally:
            self._losses.update(zip(leaves, losses, strict=False))
        tokens = sum(batch.tokens for batch in self.batches)
        told = [float(self._losses[leaf]) for leaf in share] if self._reports_losses else []
        self._accounts = AccountExchange(self.groups, self._shares, tokens, told)

    def reduce(self, wishes: Wishes | None = None) -> StepVerdict:
        """Wait for the complete gradient and vote.

        Parameters are untouched if it raises. Raises PeerLostError; on every rank alike
        NonFiniteError when any loss or gradient is NaN or infinite, and JumpError when the loss
        has jumped.
        """
        verdict: StepVerdict | None = None
        lost = PeerLostError(f"another rank of this replica lost a peer in step {self._step}")
        try:
            verdict = self._vote(wishes or Wishes())
        except PeerLostError as error:
            lost = error
            self._give_up(inside=not self.groups.is_lockstep)
        except Exception:
            self._give_up(inside=True)
            raise
        try:
            verdict = share_verdict(self.groups, verdict)
        except PeerLostError:
            self._give_up(inside=True)
            raise
        finally:
            self._on_verdict(verdict)
        if verdict is None:
            raise lost
        if verdict.is_finite and not verdict.requests.reject:
            return verdict
        found = self._jump_error(verdict) if verdict.is_finite else self._find_non_finite()
        self._is_leaving = True
        meet_before_leaving(self.groups)
        raise found

    def apply(self, verdict: StepVerdict) -> float:
        """Update the parameters; returns the learning rate that was used."""
        rate = self.update(verdict)
        self.parameters.refresh()
        return rate

    def update(self, verdict: StepVerdict) -> float:
        """`apply`, without what computes on copies: that is brought up to date by a rebuild."""
        self._on_verdict(verdict)
        rate = learning_rate(self.train, self._step)
        clip = clip_factor(verdict.mean_norm, self.train.optimizer.clip_norm)
        self.is_torn = True
        self.optimizer.apply(self._step, rate, max(verdict.tokens, 1) / clip)
        self.applied_step, self.is_torn = self._step, False  # the state is that of this step
        self.applied_verdicts.append((self._step, verdict))
        self.unreported_step = self._step
        self.step_stage = advance(self.step_stage, StepStage.APPLIED)
        return rate

    def _vote(self, wishes: Wishes) -> StepVerdict:
        """Raises PeerLostError; `step_stage` says how far it came."""
        self._gradients.finish()
        if self._accounts is None:
            raise RuntimeError("compute() comes before reduce()")
        self.account = self._accounts.wait_for_all()
        self.step_stage = advance(self.step_stage, StepStage.REDUCED)
        if self._is_stopping:
            raise _interrupted_error(self._step)
        self.loss_jump = (
            self.judge_loss(self._step, self.account) if self.account.is_finite else None
        )
        if self.loss_jump is not None:
            wishes = replace(wishes, reject=True)
        ballot = Ballot(self._gradients.squared_norm(), wishes)
        return vote(self.groups, self.account, ballot, self.on_vote_sent)

    def _on_verdict(self, verdict: StepVerdict | None) -> None:
        """Every vote is known."""
        if verdict is None:
            return
        self.verdict, self.verdict_step = verdict, self._step
        if (
            verdict.is_finite
            and not verdict.requests.reject
            and self.step_stage is StepStage.REDUCED
        ):
            self.step_stage = advance(self.step_stage, StepStage.VOTED)

    # --- a loss ---------------------------------------------------------------------------
    @property
    def step(self) -> int:
        """The step that is open, or was last."""
        return self._step

    @property
    def dealt_shares(self) -> Shares:
        """How the microbatches of that step were dealt; nothing, once its generation is over."""
        return self._shares

    @property
    def progress(self) -> StepProgress:
        """What this process has, now that it has stopped."""
        whole = self.step_stage in (StepStage.REDUCED, StepStage.VOTED)
        inside = self.groups.replica_groups
        intact = len(self.groups.replica.ranks) == 1 or not inside.is_aborted
        return StepProgress(
            self.applied_step,
            self._step if whole else None,
            self.step_stage is StepStage.VOTED,
            self.is_torn,
            intact,
        )

    @property
    def is_rejected(self) -> bool:
        """Return True if the open step was voted down, though its gradient is complete."""
        if self.verdict is None or self.verdict_step != self._step:
            return False
        return not self.verdict.is_finite or self.verdict.requests.reject

    @property
    def is_summed(self) -> bool:
        """Whether something of the open step was summed into what this rank computed of it."""
        return self.step_stage is not StepStage.APPLIED and self._gradients.is_summed

    @property
    def computed_leaves(self) -> tuple[int, ...]:
        """The microbatches of the open step that this rank has computed, and can keep."""
        return self._gradients.computed_leaves if self.step_stage is StepStage.COMPUTING else ()

    def keep_computed(self) -> None:
        """Let them be part of the step that is begun next; call before `regroup`, after which
        nothing is `computed_leaves`."""
        self._gradients.keep(self._shares[self.groups.coordinate.replica])

    def resume(self, step: int, shares: Shares, computed: Computed) -> None:
        """Let `step` continue when it begins. It is dealt as in `shares`; the replicas have
        `computed_leaves` some of it, and those of this one have kept their part."""
        self._resumed_step = ResumedStep(step, shares, computed)

    def deal_elsewhere(self, step: int, avoid: Mapping[int, Collection[int]]) -> None:
        """Move the microbatches in `avoid` away from the replicas listed there when `step`
        begins, if other replicas can take them. Every rank must receive the same. A resumed step
        is not changed."""
        if self._resumed_step is None:
            self._resumed_step = ResumedStep(step, deal_away_from(self.shares(step), avoid), ())

    def _computed_by_replica(self, step: int) -> Computed:
        resumed = self._resumed_step
        return resumed.computed if resumed is not None and resumed.step == step else ()

    def squared_norm(self) -> float:
        """Return this rank's sum of squares of the complete gradient."""
        return self._gradients.squared_norm()

    def interrupt(self, inside_replica: bool) -> None:
        """End the step that another thread is in: wake all waits between replicas, and with
        `inside_replica` also those inside this one. If this rank computes alone, it stops after its
        present microbatch. PeerLostError is raised there. Later steps end at once."""
        self._is_stopping = True
        self._gradients.fail(_interrupted_error(self._step))
        inside_replica = (inside_replica or not self.groups.is_lockstep) and not self._is_leaving
        self._give_up(inside=inside_replica)

    def regroup(self, groups: ProcessGroups, dealer: Dealer) -> None:
        """Continue among other replicas; model, state and the inside of this replica stay.

        Collective over `groups`. The old groups between replicas must have been given up. Only
        what was kept of an open step is left. Its dealing and sums belong to replicas that no
        longer exist, and all ranks have agreed to resume from the state. Raises PeerLostError;
        this engine can be regrouped again then.
        """
        self._gradients = self._feed(groups, self._gradients)
        self.optimizer.set_gradients(self._gradients.gradients())
        self.groups, self.dealer = groups, dealer
        self.first_step, self._resumed_step, self._shares = 0, None, ()
        if self.step_stage is not StepStage.APPLIED:
            self.step_stage = advance(self.step_stage, StepStage.COMPUTING)
        self._is_stopping = self._is_leaving = False
        self._on_groups_changed()

    def set_applied_step(self, step: int) -> None:
        """The state is that after `step`: it was brought from elsewhere."""
        self.applied_step, self.is_torn, self.step_stage = step, False, StepStage.APPLIED
        self._accounts = None

    # --- state ----------------------------------------------------------------------------
    def state(self) -> list[LocalTensor]:
        """Everything that a checkpoint must hold of this rank; the same storage every time."""
        return state_tensors(self.parameters, self.optimizer.exp_avg, self.optimizer.exp_avg_sq)

    def load(self, read: ReadBox) -> None:
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
    def _give_up(self, *, inside: bool) -> None:
        """Abort the groups, so that no rank waits for this one."""
        if inside:
            self.groups.abort()
        else:
            self.groups.abort_between_replicas()

    def _jump_error(self, verdict: StepVerdict) -> JumpError:
        if self.loss_jump is None:  # another rank knows more
            return JumpError(self._step, verdict.mean_loss)
        suspects = self.loss_jump.microbatches
        return JumpError(
            self._step, verdict.mean_loss, self.loss_jump.threshold, self._shares, suspects
        )

    def _find_non_finite(self) -> NonFiniteError:
        """Compute my share again without reduction, and agree with all on where it began, and on
        the microbatches that may have caused it."""
        assert self.account is not None, "nobody votes without it"
        share = self._shares[self.groups.coordinate.replica]
        found = find_non_finite(
            self.objective,
            self.executor,
            self.groups,
            self.parameters,
            list(zip(share, self.batches, strict=True)),
            len(self.account.losses),
            self._gradients.is_finite,
        )
        suspects = found.non_finite_leaves
        if not suspects:
            losses = enumerate(self.account.losses)
            suspects = tuple(leaf for leaf, loss in losses if not isfinite(loss))
        if not suspects:
            replicas = {
                self.groups.topology.replica_of(rank).index for rank in found.non_finite_ranks
            }
            suspects = tuple(sorted(leaf for r in replicas for leaf in self._shares[r]))
        return NonFiniteError(
            self._step,
            found.rank,
            found.parameter,
            self._shares,
            suspects,
            bool(found.non_finite_leaves),
        )


def _interrupted_error(step: int) -> PeerLostError:
    return PeerLostError(f"step {step} was interrupted, because the generation ends")
