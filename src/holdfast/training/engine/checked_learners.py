"""Learners whose changes count only if they pass the bounds and checks of `outer.trust`.

After all changes of a round have arrived:

1. Each rank tells the hash of the state of its learners after the round, and its processor.
2. All draw the same checks and the same checkers (`parallel/outer/trust.py`).
3. The owner of a drawn learner sends the state that the learner had before the round. The checker
   compares its hash with what the owner told a round ago, and computes the round again from it.
4. The checkers tell their verdicts. Change and state have to be equal in each bit.
5. If something differs, a third rank does the same as the checker, and its verdict counts.

A change that is left out has not happened. Its learner keeps the state that it had before the
round, and the average is that of the rest. How often that happened to each learner is a part of the
state of the run, equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.core.sharding.state_table import REFUSED_ROW
from holdfast.errors import MismatchError
from holdfast.events import ChangeLeftOut, Event, LearnerChecked
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.parallel.comm.transport import exchange
from holdfast.parallel.outer.payloads import receive_all
from holdfast.parallel.outer.trust import (
    HASH_WORDS,
    NO_CHECKERS,
    Verdict,
    choose_checkers,
    draw_checks,
    find_outliers,
    hash_words,
    processor_word,
)
from holdfast.training.engine.learners import LearnerExecutor, LearnerSlots, rows_of
from holdfast.training.engine.stage_work import GradientListener
from holdfast.training.engine.state import LocalTensor
from holdfast.training.engine.vote import meet_before_leaving

_CLAIMS_TAG, _VERDICTS_TAG, _LOSSES_TAG, _STATE_TAG = 5, 6, 7, 1 << 14
_DISPUTED = (Verdict.DIFFERS, Verdict.OTHER_STATE)


class CheckedLearners(LearnerExecutor):
    """The learners of one rank in a run with `outer.trust`.

    fetch: returns the samples of a learner in a round. Other attributes: see `LearnerExecutor`.
    """

    def __init__(self, config: RunConfig, groups: ProcessGroups, *parts: Any) -> None:
        super().__init__(config, groups, *parts)
        self._seed, self._trust = config.seed, config.outer.trust
        self.fetch: Callable[[int, int], Any] = _fetch_nothing
        device = self._working[0].device
        self._processor = processor_word(device)
        self._refused = torch.zeros(self._learners, dtype=torch.int64, device=device)
        self._next_refused = self._refused.clone()
        self._claims: list[tuple[int, ...]] = []  # hashes of the learners' states
        self._claims_step = 0  # after this round
        self._next_claims: list[tuple[int, ...]] = []
        self._states_sent: list[Tensor] = []  # in this round
        self._left_out: dict[int, str] = {}
        self._events: list[Event] = []
        self._owners = [
            next(rank for rank, share in enumerate(self._shares) if learner in share)
            for learner in range(self._learners)
        ]

    # --- a round --------------------------------------------------------------------------
    def _admit(
        self, payloads: dict[int, Tensor], changes: list[Tensor], listener: GradientListener
    ) -> list[Tensor]:
        """Find the changes of the round that are left out, and take them back here."""
        trust, step, refused = self._trust, self.step(), self._refused.tolist()
        self._events, counts = [], list(refused)
        suspects = {k for k, count in enumerate(refused) if trust.limit and count >= trust.limit}
        self._left_out = find_outliers(changes, trust.norm, trust.direction)
        if trust.held_out:
            self._left_out |= self._find_worse(changes)
        if trust.checks:
            verdicts = self._check(payloads, suspects, listener)
            for learner, verdict in verdicts.items():
                if verdict in _DISPUTED:
                    words = "change" if verdict is Verdict.DIFFERS else "state"
                    self._left_out[learner] = f"a check found another {words}"
                elif verdict is Verdict.NO_CHECKER and learner in suspects:
                    self._left_out.setdefault(learner, "no worker can check it")
                elif verdict is Verdict.EQUAL and learner not in self._left_out:
                    counts[learner] = 0
        else:
            self._left_out |= {
                k: f"{refused[k]} changes were left out before"
                for k in suspects - {*self._left_out}
            }
        for learner, reason in sorted(self._left_out.items()):
            counts[learner] = refused[learner] + 1
            owner = self._owners[learner]
            reporter = next(r for r in (0, 1) if r != owner or self._groups.replica_count == 1)
            if self._groups.coordinate.replica == reporter:
                node = self._groups.topology.nodes[owner]
                event = ChangeLeftOut(learner, owner, node, reason, counts[learner], step=step)
                self._events.append(event)
            if learner in self._own:
                self._keep_state(self._own.index(learner))
        self._next_refused.copy_(torch.tensor(counts))
        return changes

    def _combined(self, changes: list[Tensor]) -> list[Tensor]:
        """As of `LearnerExecutor`, without those that are left out."""
        rest = [change for k, change in enumerate(changes) if k not in self._left_out]
        if len(rest) == len(changes):
            return super()._combined(changes)
        nothing = torch.zeros_like(changes[0])
        if not rest:
            return [nothing] * self._learners
        if not self._rule:
            result = torch.stack(rest).mean(0).mul_(self._learners)
        elif self._rule == "rda":
            result = super()._combined(rest)[0]
        else:  # a rule counts what is not finite as faulty
            bad = torch.full_like(nothing, torch.nan)
            given = [bad if k in self._left_out else c for k, c in enumerate(changes)]
            result = super()._combined(given)[0]
        return [result, *[nothing] * (self._learners - 1)]

    # --- checks ---------------------------------------------------------------------------
    def _check(
        self, payloads: dict[int, Tensor], suspects: set[int], listener: GradientListener
    ) -> dict[int, Verdict]:
        """The verdict of each check of the round, the same on all ranks. Raises PeerLostError."""
        step = self.step()
        self._next_claims, processors = self._exchange_claims()
        sent = [(*hash_words([payloads[k]]), *self._next_claims[k]) for k in range(self._learners)]
        drawn = draw_checks(self._seed, step, sent, self._trust.checks, suspects)
        checkers = choose_checkers(self._seed, step, drawn, self._owners, processors)
        self._states_sent = []
        verdicts = self._judge(checkers, payloads, listener)
        disputed = [k for k, verdict in verdicts.items() if verdict in _DISPUTED]
        known = self._seed, step, disputed, self._owners, processors
        third = {k: r for k, r in choose_checkers(*known, checkers).items() if r is not None}
        if third:
            verdicts |= self._judge(third, payloads, listener, checkers)
        if disputed and self._trust.on_mismatch == "stop":
            self._stop(disputed[0], verdicts, checkers, third)
        return verdicts

    def _judge(
        self,
        checkers: Mapping[int, int | None],
        payloads: dict[int, Tensor],
        listener: GradientListener,
        before: Mapping[int, int | None] = NO_CHECKERS,
    ) -> dict[int, Verdict]:
        """Let ranks compute rounds of learners again. Returns their verdicts. before: ranks that
        found something else."""
        step, me = self.step(), self._groups.coordinate.replica
        found = torch.zeros(self._learners, dtype=torch.int64)
        control = self._groups.control
        for learner, checker in checkers.items():
            if learner in self._own and checker is not None:
                state = _join(_row_of(self._states, self._own.index(learner)))
                self._states_sent.append(state)
                control.send(state, checker, _STATE_TAG + learner)
        for learner, checker in checkers.items():
            if checker == me:
                found[learner] = int(self._recompute(learner, payloads[learner], listener))
        self._parameters.refresh()
        lengths = [self._learners] * control.size
        told = torch.stack(exchange(control, found, lengths, _VERDICTS_TAG))
        verdicts: dict[int, Verdict] = {}
        for learner, checker in checkers.items():
            verdict = Verdict.NO_CHECKER
            if checker is not None:
                verdict = Verdict(int(told[checker, learner]))
            verdicts[learner] = verdict
            owner = self._owners[learner]
            if me == (owner if checker is None else checker):
                by, word = -1 if checker is None else checker, verdict.name.lower()
                first = before.get(learner)
                against = [] if first is None or verdict in _DISPUTED else [first]
                self._events.append(LearnerChecked(learner, owner, by, word, against, step=step))
        return verdicts

    def _stop(
        self,
        learner: int,
        verdicts: Mapping[int, Verdict],
        checkers: Mapping[int, int | None],
        third: Mapping[int, int],
    ) -> None:
        """Raises MismatchError, on every rank alike."""
        owner, nodes, checker = (
            self._owners[learner],
            self._groups.topology.nodes,
            checkers[learner],
        )
        text = f"rank {owner} ({nodes[owner]}) computed learner {learner} otherwise than rank"
        text = f"round {self.step()}: {text} {checker} ({nodes[checker or 0]})"
        if learner in third:
            rank = owner if verdicts[learner] is Verdict.EQUAL else checker
            text += f"; rank {third[learner]} ({nodes[third[learner]]}) agrees with rank {rank}"
        meet_before_leaving(self._groups)
        raise MismatchError(
            text,
            where="outer.trust.on_mismatch",
            remedy="take the node that is wrong away, or use outer.trust.on_mismatch=leave_out",
        )

    @torch.no_grad()
    def _find_worse(self, changes: list[Tensor]) -> dict[int, str]:
        """The learners whose change raises the loss of held-out samples above the bound. Those are
        the first ones that the next learner read. One rank measures a learner, so all ranks decide
        alike."""
        control, step = self._groups.control, self.step()
        judges = [(owner + 1) % control.size for owner in self._owners]
        found = torch.zeros(self._learners, dtype=torch.float64)
        masters = self._parameters.master_tensors
        for learner, change in enumerate(changes):
            if judges[learner] == control.rank and learner not in self._left_out:
                batch = self.fetch(step, (learner + 1) % self._learners)
                samples = rows_of(batch, 0, len(batch.inputs) // self._every)
                moved = [m - c for m, c in zip(masters, self._split(change), strict=True)]
                before = self._loss_of(masters, samples)
                found[learner] = self._loss_of(moved, samples) / (before or 1.0) - 1.0
        self._parameters.refresh()
        lengths = [self._learners] * control.size
        told = exchange(control, found.view(torch.int64), lengths, _LOSSES_TAG)
        rises = [float(told[rank].view(torch.float64)[k]) for k, rank in enumerate(judges)]
        return {
            k: f"the loss of held-out samples rises by {rise:.1%}"
            for k, rise in enumerate(rises)
            if not rise <= self._trust.held_out and k not in self._left_out
        }

    def _loss_of(self, weights: list[Tensor], samples: Any) -> float:
        """The sum of the losses of samples."""
        torch._foreach_copy_(self._working, weights)
        self._update_compute_tensors()
        losses = self._passes.evaluate(self._cut(samples), self.on_progress)
        return float(torch.stack(losses).sum(0).flatten()[0])

    def _exchange_claims(self) -> tuple[list[tuple[int, ...]], list[int]]:
        """Tell what the states of this rank's learners are after the round. Returns the same of all
        learners, and the processor of each rank."""
        control = self._groups.control
        words = [self._processor]
        for row in range(len(self._own)):
            words += hash_words(_row_of(self._next_states, row))
        lengths = [1 + HASH_WORDS * len(share) for share in self._shares]
        told = exchange(control, torch.tensor(words, dtype=torch.int64), lengths, _CLAIMS_TAG)
        claims: list[tuple[int, ...]] = [()] * self._learners
        for share, record in zip(self._shares, told, strict=True):
            rest = record[1:].view(-1, HASH_WORDS).tolist()
            for learner, claim in zip(share, rest, strict=True):
                claims[learner] = tuple(claim)
        return claims, [int(record[0]) for record in told]

    def _recompute(self, learner: int, payload: Tensor, listener: GradientListener) -> Verdict:
        """Compute the round of another rank's learner again, from the state that it sends."""
        before, after = self._make_states(self._like, 1), self._make_states(self._like, 1)
        rows = _row_of(before, 0)
        received = torch.empty_like(_join(rows))
        source, control = self._owners[learner], self._groups.control
        receive_all(control, [control.receive(received, source, _STATE_TAG + learner)])
        _split_into(received, rows)
        is_known = self._claims_step == self.step() - 1 and bool(self._claims)
        if is_known and hash_words(rows) != self._claims[learner]:
            return Verdict.OTHER_STATE
        own, states, new = self._own, self._states, self._next_states
        self._own, self._states, self._next_states = (learner,), before, after
        try:
            batch = self.fetch(self.step(), learner)
            self._run_round(learner, batch, listener)
            assert self._codec is not None, "a run with checks sends payloads"
            again = self._encode(learner, self._changes(batch.tokens), self._codec)
            is_equal = torch.equal(again, payload)
            is_equal &= hash_words(_row_of(after, 0)) == self._next_claims[learner]
        finally:
            self._own, self._states, self._next_states = own, states, new
        return Verdict.EQUAL if is_equal else Verdict.DIFFERS

    # --- what is kept ---------------------------------------------------------------------
    def commit(self) -> None:
        """See `LearnerStates`."""
        super().commit()
        self._refused.copy_(self._next_refused)
        was_known = self._claims_step == self.step() - 1 and bool(self._claims)
        if self._left_out and not was_known:
            self._claims = []  # of a learner that was taken back, the hash is not known
        else:
            kept = {learner: self._claims[learner] for learner in self._left_out}
            self._claims = [kept.get(k, claim) for k, claim in enumerate(self._next_claims)]
        self._claims_step = self.step()

    def reset(self) -> None:
        """See `LearnerStates`."""
        super().reset()
        self._refused.zero_()

    def events(self) -> list[Event]:
        """See `LearnerStates`."""
        return self._events

    def state(self) -> list[LocalTensor]:
        """See `LearnerStates`."""
        shape = tuple(self._refused.shape)
        return [*super().state(), LocalTensor(REFUSED_ROW, self._refused, (0,), shape)]


def _fetch_nothing(step: int, learner: int) -> Any:
    raise RuntimeError("the session gives the samples of a learner that is checked")


def _row_of(states: LearnerSlots, row: int) -> list[Tensor | None]:
    """The tensors of one learner."""
    return [None if t is None else t[row] for tensors in states for t in tensors]


def _join(tensors: Sequence[Tensor | None]) -> Tensor:
    """The bytes of all of them in host memory: [bytes] uint8"""
    parts = [
        t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in tensors if t is not None
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


@torch.no_grad()
def _split_into(joined: Tensor, tensors: Sequence[Tensor | None]) -> None:
    start = 0
    for tensor in tensors:
        if tensor is not None:
            part = joined[start : start + tensor.nbytes].clone()
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
            start += tensor.nbytes
