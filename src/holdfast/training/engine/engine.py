"""The step engine: what one rank does in one step, in five calls.

    begin(N)          open the reduction of step N; returns my share of its microbatches
    compute(batches)  forward and backward of each; gradients leave while the backward goes on
    reduce(wishes)    finish the sum, take its norm, vote
    apply(verdict)    divide once by the global token count, clip, update
    state(), load()   what a checkpoint holds

Nothing before `apply` changes a parameter, so a step that fails anywhere has not happened.
A runner drives the calls; the engine knows nothing of clocks, journals or checkpoints.

When a peer is lost, `status` describes what the engine still has. `recover.py` then finds the
step that all ranks resume from. If other ranks compute in lockstep with this one, a failure between
replicas is stored until all of them reach the end of `reduce`. It is raised on all or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from holdfast.config.sections.train import TrainConfig
from holdfast.core.sharding.reduction_tree import Shares, deal
from holdfast.core.spans import CONTROL, VOTE
from holdfast.core.weights import to_units
from holdfast.data.stream.loader import LoadedMicrobatch
from holdfast.errors import HoldfastError, JumpError, PeerLostError
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.parallel.gradients.feeder import GradientFeeder
from holdfast.parallel.gradients.grad_norm import clip_factor
from holdfast.parallel.torch_compat import is_peer_loss
from holdfast.policy.detection.loss_spikes import LossJump
from holdfast.policy.recovery.step_resolution import StepStage
from holdfast.training.engine.executors import Executor
from holdfast.training.engine.lagged import LaggedPolicies
from holdfast.training.engine.loss_scale import NOT_SCALED, LossScale
from holdfast.training.engine.nonfinite import find_non_finite
from holdfast.training.engine.precision import as_indeterminate
from holdfast.training.engine.state import (
    LocalTensor,
    Parameters,
    ReadBox,
    clear,
    load_state,
    state_tensors,
)
from holdfast.training.engine.step_plan import Dealer, StepPlan
from holdfast.training.engine.step_status import StepHistory, StepStatus
from holdfast.training.engine.vote import (
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
from holdfast.training.objectives.registry import means_of, sum_names_of
from holdfast.training.optimizers.make_optimizer import UserParts, make_optimizer

if TYPE_CHECKING:
    from holdfast.training.engine.protocols import LearnerStates, StepFeed, StepShare


GradientFeed = Callable[[ProcessGroups, GradientFeeder | None], GradientFeeder]
"""Returns the gradients' summation for the groups of a generation: the old one if it may stay."""


class StepEngine:
    """Training of one model on one rank, whatever the rank's part of it is.

    objective: module from a microbatch to a scalar loss sum, or a stage of it.
    executor: runs its passes. feed: makes what sums gradients, for these groups and for later ones.
    plan: who computes which microbatch. status: how far it has come. history: of earlier steps; a
    rebuilt session keeps it. user: what the run file names by a path.
    measure_passes: passes run inside of it. on_vote_sent: called when this rank's vote is on its
    way. order_shares: the shares of a generation, one by one, as the executor needs them.
    on_summed: is given the parameters and their complete gradients, which it may change.
    around_update: the parameters are updated inside of it.
    judge_loss: is shown the account of a step before this rank votes; whether it has jumped, on one
    rank. loss_jump: what it found of the newest step. loss_scale: see `Executor`. lagged: older
    weights that the run still needs. on_applied: called with a step once it has been applied.
    learners: what this rank keeps of those that train apart (`train` is that of a round then).
    sum_names: of what an objective adds up next to the loss. counts: see `events.StepDone`.
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
        user: UserParts | None = None,
        loss_scale: LossScale = NOT_SCALED,
        lag: int = 0,
        learners: LearnerStates | None = None,
    ):
        self._user, self.objective, self.executor = user or UserParts(), objective, executor
        executor.loss_scale = self.loss_scale = loss_scale
        self.sum_names, self.counts = sum_names_of(objective), ""
        self.parameters, self.groups, self.train = parameters, groups, train
        self._feed, self.device, self._gradients = feed, device, feed(groups, None)
        self.measure_passes: Callable[[], AbstractContextManager[None]] = nullcontext
        self.on_vote_sent: Callable[[], None] = lambda: None
        self.order_shares: Callable[[StepFeed], Iterator[StepShare]] = iter
        self.judge_loss: Callable[[int, StepAccount], LossJump | None] = lambda step, account: None
        self.loss_jump: LossJump | None = None
        self.on_summed: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = lambda *_: None
        self.around_update: Callable[[Sequence[Tensor]], AbstractContextManager[None]] = lambda _: (
            nullcontext()
        )
        self.learners = learners
        self.plan = StepPlan(train, groups, dealer, is_fixed=learners is not None)
        self.status, self.history = StepStatus(), StepHistory()
        held, gradients = (parameters.table, parameters.master_tensors), self._gradients.gradients()
        where = parameters.memory, parameters.boxes
        self.optimizer = make_optimizer(train.optimizer, *held, gradients, self._user, *where)
        self.lagged = LaggedPolicies(parameters, lag)
        self.on_applied: Callable[[int], None] = lambda step: None
        self._shares: Shares = ()
        self.batches: list[LoadedMicrobatch] = []  # of the step that is open, or was last
        self._accounts: AccountExchange | None = None
        self._losses: dict[int, Tensor] = {}  # of my share, if this rank receives them
        self._is_stopping = self._is_leaving = False  # leaving: it waits for no peer any more
        self._on_groups_changed()

    def _on_groups_changed(self) -> None:
        """What follows from the groups."""
        self._reports_losses = reports_losses(self.groups.replica, self.groups.coordinate)
        self._gradients.defers_errors = self.groups.is_lockstep

    # --- a step ---------------------------------------------------------------------------
    def begin(self, step: int) -> tuple[int, ...]:
        """Open step `step` and return my share. Raises PeerLostError."""
        self.status.begin(step)
        self.loss_scale.begin()
        self._shares, self.batches, self._accounts = self.plan.shares(step), [], None
        computed = self.plan.computed_by_replica(step)
        self._losses = self._losses if computed else {}
        if self.learners is not None:
            self.learners.open(step, self._gradients, self.optimizer)
        try:
            self._gradients.begin(self.plan.leaves(step), self._shares, computed)
        except PeerLostError:
            self.groups.abort()
            raise
        if self._is_stopping:  # just before, and `begin` has forgotten it
            self._gradients.fail(_interrupted_error(step))
        return self._shares[self.groups.coordinate.replica]

    def compute(self, batches: Sequence[LoadedMicrobatch]) -> None:
        """Run forward and backward of my share, in its order. Skip the microbatches that were
        computed before the step was resumed. Raises PeerLostError."""
        replica = self.groups.coordinate.replica
        share, computed = self._shares[replica], self.plan.computed_by_replica(self.step)
        self.batches = list(batches)
        leaves = [leaf for leaf in share if not computed or leaf not in computed[replica]]
        by_leaf, losses = dict(zip(share, self.batches, strict=True)), list[Tensor]()
        try:
            with self.measure_passes():
                todo = [(leaf, by_leaf[leaf]) for leaf in leaves]
                self.executor.train(todo, self._gradients, losses)
            if self.device.type != "cpu":  # else its work would count as the next phase's
                torch.accelerator.synchronize(self.device)
        except Exception as error:
            self._gradients.fail(error)
            self.groups.abort()  # wakes ranks that wait for this one in another group
            known = _known_error(error, self.step)
            if known is None:
                raise
            raise known from error
        finally:
            self._losses.update(zip(leaves, losses, strict=False))
        told: list[float] = []
        for leaf in share if self._reports_losses else ():
            told += self._losses[leaf].flatten().tolist()
        if self.learners is None:
            units = sum(to_units(batch.tokens) for batch in self.batches)
        else:
            units = self.learners.used_units(self.batches)
        width = 1 + 2 * len(self.sum_names)
        self._accounts = AccountExchange(self.groups, self._shares, units, told, width)

    def reduce(self, wishes: Wishes | None = None) -> StepVerdict:
        """Wait for the complete gradient and vote.

        Parameters are untouched if it raises. Raises PeerLostError; on every rank alike
        NonFiniteError when any loss or gradient is NaN or infinite, and JumpError when the loss
        has jumped.
        """
        verdict: StepVerdict | None = None
        lost = PeerLostError(f"another rank of this replica lost a peer in step {self.step}")
        try:
            verdict = self._vote(wishes or Wishes())
        except PeerLostError as error:
            lost = error
            _give_up(self.groups, inside=not self.groups.is_lockstep)
        except Exception:
            _give_up(self.groups, inside=True)
            raise
        try:
            verdict = share_verdict(self.groups, verdict, 2 * len(self.sum_names))
        except PeerLostError:
            _give_up(self.groups, inside=True)
            raise
        finally:
            if verdict is not None:
                self.status.record_verdict(verdict)
        if verdict is None:
            raise lost
        if verdict.can_be_applied:
            return verdict
        found = self._rejection_error(verdict)
        self._is_leaving = True
        meet_before_leaving(self.groups)
        raise found

    def _rejection_error(self, verdict: StepVerdict) -> HoldfastError:
        """Why the step was voted down, alike on every rank. If something is not finite, compute my
        share again without reduction, and agree with all on where it began."""
        if not (verdict.is_finite or verdict.is_skipped):
            return find_non_finite(self, self._gradients.is_finite)
        jump = self.loss_jump
        if jump is None:  # another rank knows more
            return JumpError(self.step, verdict.mean_loss)
        shares, suspects = self.dealt_shares, jump.microbatches
        return JumpError(self.step, verdict.mean_loss, jump.threshold, shares, suspects)

    def apply(self, verdict: StepVerdict) -> float:
        """Update the parameters; returns the learning rate that was used."""
        rate = self.update(verdict)
        self.parameters.refresh()
        self.on_applied(self.status.step)
        return rate

    def update(self, verdict: StepVerdict) -> float:
        """`apply`, without what computes on copies: that is brought up to date by a rebuild."""
        status, rate = self.status, self.learning_rate(self.step)
        status.record_verdict(verdict)
        clip = clip_factor(self.mean_norm(verdict), self.train.optimizer.clip_norm)
        status.is_torn = True
        self.lagged.shift()
        applies = self.learners is None or not self.learners.applies_update
        if applies and not verdict.is_skipped:
            divisor = self._divisor(verdict) / clip * self.loss_scale.factor
            with self.around_update(self.parameters.master_tensors):
                self.optimizer.apply(status.step, rate, divisor, self.plan.leaves(status.step))
        if self.learners is not None:
            self.learners.commit()
            self.history.learner_fates = status.step, self.learners.fates
        self.history.applied_verdicts.append((status.step, self.loss_scale.settle(verdict)))
        status.finish_update()
        self.history.unreported_step = status.step
        return self.shown_rate(status.step)

    def _divisor(self, verdict: StepVerdict) -> float:
        """What the sum over microbatches is divided by."""
        if self.learners is not None:
            return self.learners.divisor(verdict.tokens)
        return verdict.tokens or 1

    def mean_norm(self, verdict: StepVerdict) -> float:
        """Norm of what a step is applied with; 0 if it is skipped."""
        if self.learners is None:
            return verdict.mean_norm
        return verdict.norm / self._divisor(verdict)

    def shown_rate(self, step: int) -> float:
        """The learning rate of a step for its report: with learners that of their last one."""
        return self.learning_rate(step) if self.learners is None else self.learners.rate(step)

    def metrics(self, verdict: StepVerdict) -> dict[str, float]:
        """The means of an objective's sums in a step."""
        return means_of(self.sum_names, verdict.sums)

    def learning_rate(self, step: int) -> float:
        """The rate that a step is applied with. Raises UserError for a function that fails."""
        return self._user.learning_rate(self.train, step)

    def _vote(self, wishes: Wishes) -> StepVerdict:
        """Raises PeerLostError; `status` says how far it came."""
        self._gradients.finish()
        self.on_summed(self.parameters.master_tensors, self._gradients.gradients())
        if self._accounts is None:
            raise RuntimeError("compute() comes before reduce()")
        self.status.record_account(account := self._accounts.wait_for_all())
        if self._is_stopping:
            raise _interrupted_error(self.step)
        self.loss_jump = self.judge_loss(self.step, account) if account.is_finite else None
        if self.loss_jump is not None:
            wishes = replace(wishes, reject=True)
        rate, norm = self.learning_rate(self.step), self.squared_norm()
        ballot = Ballot(norm, wishes, learning_rate=rate, options=self._user.options(self.step))
        recorder = self.groups.recorder
        with nullcontext() if recorder is None else recorder.span(CONTROL, VOTE):
            verdict = vote(self.groups, account, ballot, self.on_vote_sent)
        return self.loss_scale.judge(verdict)

    # --- a loss ---------------------------------------------------------------------------
    @property
    def step(self) -> int:
        """The step that is open, or was last."""
        return self.status.step

    @property
    def dealt_shares(self) -> Shares:
        """How the microbatches of that step were dealt; nothing, once its generation is over."""
        return self._shares

    @property
    def is_replica_intact(self) -> bool:
        """Whether the groups inside the replica can still be used."""
        if self.learners is not None and not self.learners.applies_update:
            return False  # other learners may come, with state that is elsewhere now
        alone = len(self.groups.replica.ranks) == 1
        return alone or not self.groups.replica_groups.is_aborted

    @property
    def is_summed(self) -> bool:
        """Whether something of the open step was summed into what this rank computed of it."""
        return self.status.stage is not StepStage.APPLIED and self._gradients.is_summed

    @property
    def computed_leaves(self) -> tuple[int, ...]:
        """The microbatches of the open step that this rank has computed, and can keep."""
        can_keep = self.status.stage is StepStage.COMPUTING and not self.executor.is_asynchronous
        can_keep = can_keep and not self.plan.is_fixed
        return self._gradients.computed_leaves if can_keep else ()

    def keep_computed(self) -> None:
        """Let them be part of the step that is begun next; call before `regroup`, after which
        nothing is `computed_leaves`."""
        self._gradients.keep(self._shares[self.groups.coordinate.replica])

    def squared_norm(self) -> float:
        """This rank's sum of squares of the complete gradient, without the loss scale."""
        return self._gradients.squared_norm() / self.loss_scale.factor**2

    def interrupt(self, inside_replica: bool) -> None:
        """End the step that another thread is in: wake all waits between replicas, and with
        `inside_replica` also those inside this one. If this rank computes alone, it stops after its
        present microbatch. PeerLostError is raised there. Later steps end at once."""
        self._is_stopping = True
        self._gradients.fail(_interrupted_error(self.step))
        inside_replica = (inside_replica or not self.groups.is_lockstep) and not self._is_leaving
        _give_up(self.groups, inside=inside_replica)

    def regroup(self, groups: ProcessGroups, dealer: Dealer) -> None:
        """Continue among other replicas; model, state and the inside of this replica stay.

        Collective over `groups`. The old groups between replicas must have been given up. Only
        what was kept of an open step is left. Its dealing and sums belong to replicas that no
        longer exist, and all ranks have agreed to resume from the state. Raises PeerLostError;
        this engine can be regrouped again then.
        """
        self._gradients = self._feed(groups, self._gradients)
        self.optimizer.set_gradients(self._gradients.gradients())
        self.groups, self._shares = groups, ()
        self.plan.regroup(groups, dealer)
        self.status.reopen()
        self._is_stopping = self._is_leaving = False
        self._on_groups_changed()

    def set_applied_step(self, step: int) -> None:
        """The state is that after `step`: it was brought from elsewhere."""
        self.status.set_applied(step)
        self._accounts = None

    # --- state ----------------------------------------------------------------------------
    def state(self) -> list[LocalTensor]:
        """All that a checkpoint must hold of this rank; the same storage every time."""
        state = state_tensors(self.parameters, self.optimizer.slots)
        state += self.loss_scale.state() + self.lagged.state()
        return state if self.learners is None else state + self.learners.state()

    def load(self, read: ReadBox) -> None:
        """Fill the state in place from a reader of boxes."""
        load_state(self.state(), read)
        self.parameters.refresh()

    def initialise(self, seed: int) -> None:
        """Initial weights, and slots of zero."""
        self.parameters.initialise(seed)
        clear(self.optimizer.slots)
        self.loss_scale.reset()
        self.lagged.reset()
        if self.learners is not None:
            self.learners.reset()

    def close(self) -> None:
        """Leave the groups in an orderly way."""
        self.groups.close()


def _give_up(groups: ProcessGroups, *, inside: bool) -> None:
    """Abort the groups, so that no rank waits for this one."""
    if inside:
        groups.abort()
    else:
        groups.abort_between_replicas()


def _known_error(error: Exception, step: int) -> HoldfastError | None:
    """What an error of torch in a pass means, where its text says it."""
    if isinstance(error, RuntimeError) and is_peer_loss(error):
        # It is kept. A graph in its frames, which the collector does not see, would hold the model.
        error.__traceback__ = None
        return PeerLostError(f"a peer was lost in step {step}: {error}")
    return as_indeterminate(error)


def _interrupted_error(step: int) -> PeerLostError:
    return PeerLostError(f"step {step} was interrupted, because the generation ends")
