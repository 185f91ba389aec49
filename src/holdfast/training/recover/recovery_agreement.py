"""The exchange between the processes of a new generation before any state moves.

Each process sends one small record: the step of its state, its progress in the next one, and the
numbers of that step. All then compute the same result:

- the step that all resume from (`policy/recovery/step_resolution.py`), and its verdict
- the processes that have a state at all
- the replicas that may keep what lies inside them

A newcomer takes part, and reports that it has nothing.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch

from holdfast.core.sharding.step_resume import Computed
from holdfast.core.weights import shortest
from holdfast.errors import LayoutError
from holdfast.layout import Replica, Topology
from holdfast.parallel.comm.transport import PeerGroup, exchange
from holdfast.parallel.gradients.grad_norm import combine_norms
from holdfast.policy.recovery.step_resolution import (
    RankProgress,
    StepResolution,
    StepStage,
    resolve_step,
)
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.vote import (
    VERDICT_WORDS,
    StepVerdict,
    Wishes,
    verdict_from_words,
    verdict_words,
)

CameFrom = Sequence[int | None]

_AGREEMENT_TAG = 10
_STAGES = tuple(StepStage)
_BITS_PER_WORD = 62  # of a mask, in one word
_SUMMED, _INTACT, _VERDICT, _COUNTED = 1, 2, 4, 8


@dataclass(frozen=True)
class RankStatement:
    """One process's statement about itself.

    is_replica_intact: what lies inside its replica can be used. verdict: of step `verdict_step`,
    the newest that it knows. validated_step: the newest step up to which it knows that every
    validation was computed. tokens, loss: of the step whose complete gradient it holds, if they are
    `has_counts` and finite; squared_norm: of what it answers for in that gradient. computed_leaves:
    the microbatches that it has computed of a step of which it has not `summed` anything.
    """

    progress: RankProgress
    is_replica_intact: bool = False
    verdict: StepVerdict | None = None
    verdict_step: int = 0
    validated_step: int = 0
    has_counts: bool = False
    tokens: float = 0
    loss: float = 0.0
    squared_norm: float = 0.0
    computed_leaves: tuple[int, ...] = ()
    sums: tuple[float, ...] = ()


NO_STATE = RankStatement(RankProgress(None))


def statement_of(engine: StepEngine, step: int) -> RankStatement:
    """What a process with a state can say. step: of that state, where the engine has not applied
    any itself."""
    if engine.status.is_torn:
        return NO_STATE
    account = engine.status.account
    stage = StepStage.COMPUTING if engine.status.stage is StepStage.APPLIED else engine.status.stage
    applied = step if engine.status.applied_step is None else engine.status.applied_step
    whole = engine.status.reduced_step is not None and account is not None
    counts = account is not None and account.is_finite and not engine.status.is_rejected
    return RankStatement(
        RankProgress(applied, stage, engine.is_summed),
        engine.is_replica_intact,
        engine.status.verdict,
        engine.status.verdict_step,
        engine.history.validated_step or 0,
        has_counts=whole and counts,
        tokens=account.tokens if whole and account is not None else 0,
        loss=account.loss if whole and account is not None else 0.0,
        sums=account.sums if whole and account is not None else (),
        squared_norm=engine.squared_norm() if whole else 0.0,
        computed_leaves=engine.computed_leaves,
    )


@dataclass(frozen=True)
class Agreement:
    """The conclusions that all processes reach alike.

    verdict: of the step that all are at, if any rank knows it. came_from: as given, without the
    ranks that turned out to have no state. kept_replicas: the replicas of the new topology whose
    inside stays. computed_leaves: what each of them has of the next step, which continues; empty if
    it restarts. validated_step: the newest step up to which every validation was computed;
    validators: the new ranks that know of it.
    """

    resolution: StepResolution
    verdict: StepVerdict | None
    came_from: tuple[int | None, ...]
    kept_replicas: frozenset[int]
    computed_leaves: Computed = ()
    validated_step: int = 0
    validators: tuple[int, ...] = ()


def agree(
    control: PeerGroup,
    statement: RankStatement,
    topology: Topology,
    old_topology: Topology,
    came_from: CameFrom,
    max_microbatches: int,
    sums: int = 0,
) -> Agreement:
    """Exchange the statements of all ranks over `control`, and draw the conclusions.

    max_microbatches: microbatches that any step has. sums: numbers that an objective adds up in a
    step. old_topology: the topology that spreads the
    present state. came_from: see `core.sharding.reshard_plan.plan_reshard`. Raises PeerLostError.
    Raises LayoutError, on every rank alike, if ranks were given different rebuilds or no rank has a
    state.
    """
    order = [rank for replica in topology.replicas for rank in replica.ranks]
    made_from = [topology.to_json(), old_topology.to_json(), list(came_from)]
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    plan = int(digest[:15], 16), int(digest[15:30], 16)
    said = _encode(statement, max_microbatches, sums)
    record = torch.tensor([*plan, *said], dtype=torch.int64)
    answers = exchange(control, record, [len(record)] * control.size, _AGREEMENT_TAG)
    words = dict(zip(order, (answer.tolist() for answer in answers), strict=True))
    if any(words[rank][: len(plan)] != list(plan) for rank in order):
        raise LayoutError(
            "ranks were told of different rebuilds",
            where="topology",
            remedy="give all of them one topology, and one list of where they came from",
        )
    by_rank = [_decode(words[rank][len(plan) :], sums) for rank in range(topology.world_size)]
    return conclude(by_rank, topology, old_topology, came_from)


def conclude(
    statements: Sequence[RankStatement],
    topology: Topology,
    old_topology: Topology,
    came_from: CameFrom,
) -> Agreement:
    """Return what follows from the statements of the new topology's ranks. Raises LayoutError."""
    holdings = [
        s.progress if was is not None else RankProgress(None)
        for s, was in zip(statements, came_from, strict=True)
    ]
    norm = _combined_norm(statements, old_topology, came_from)
    counted = norm is not None and isfinite(norm)
    counted = counted and all(s.has_counts for s in statements if s.progress.has_whole_gradient)
    try:
        found = resolve_step(holdings, has_counts=counted)
    except ValueError as error:
        raise LayoutError(f"{error}", remedy="restore this run from a checkpoint") from error
    heard = (
        s.verdict for s in statements if s.verdict is not None and s.verdict_step == found.step
    )
    known = next((v for v in heard if v.can_be_applied), None)
    if known is None and found.appliers and norm is not None:
        one = statements[min(found.appliers)]
        known = StepVerdict(
            one.tokens,
            one.loss,
            norm,
            is_whole=True,
            is_finite=True,
            requests=Wishes(),
            sums=one.sums,
        )
    stayed = tuple(None if rank in found.receivers else was for rank, was in enumerate(came_from))
    kept = frozenset(
        replica.index
        for replica in topology.replicas
        if _is_replica_kept(replica, old_topology, stayed, statements)
    )
    computed = _kept_leaves(found, kept, topology, old_topology, statements)
    newest = [
        0 if was is None else s.validated_step for s, was in zip(statements, came_from, strict=True)
    ]
    validators = tuple(rank for rank, step in enumerate(newest) if step and step == max(newest))
    return Agreement(found, known, stayed, kept, computed, max(newest), validators)


def _kept_leaves(
    found: StepResolution,
    kept: frozenset[int],
    topology: Topology,
    before: Topology,
    said: Sequence[RankStatement],
) -> Computed:
    """Return what stays of the open step. If other kinds of replicas take part, the cells are
    cut differently and the buffers are made again, so nothing stays."""
    if not found.can_continue_step or set(before.kinds) != set(topology.kinds):
        return ()
    out: list[tuple[int, ...]] = []
    for replica in topology.replicas:
        sets = {said[rank].computed_leaves for rank in replica.ranks}
        here = replica.index in kept and len(sets) == 1
        here = here and all(said[r].progress.applied_step == found.step for r in replica.ranks)
        out.append(sets.pop() if here else ())
    return tuple(out) if any(out) else ()


def _is_replica_kept(
    replica: Replica, before: Topology, came_from: CameFrom, said: Sequence[RankStatement]
) -> bool:
    """Return True if a replica has just the ranks of an old one, in the same places, and nothing
    inside it was given up."""
    origins = tuple(came_from[rank] for rank in replica.ranks)
    if origins[0] is None:
        return False
    old = before.replica_of(origins[0])
    # How far each came in the step is another matter: its ranks sum different parts of it.
    applied = {said[rank].progress.applied_step for rank in replica.ranks}
    return (
        old.ranks == origins
        and old.kind == replica.kind
        and len(applied) == 1
        and all(said[rank].is_replica_intact for rank in replica.ranks)
    )


def _combined_norm(
    said: Sequence[RankStatement], before: Topology, came_from: CameFrom
) -> float | None:
    """Return the norm of the complete gradient, combined from the survivors as in a vote. The
    first kind counts of whose every place a rank still answers, in any replica of that kind."""
    squares = {
        was: s.squared_norm
        for s, was in zip(said, came_from, strict=True)
        if was is not None and s.progress.has_whole_gradient
    }
    for kind in before.kinds:
        alike = [replica for replica in before.replicas if replica.kind == kind]
        places: list[float] = []
        for at in range(len(alike[0].ranks)):
            found = [squares[r.ranks[at]] for r in alike if r.ranks[at] in squares]
            places += found[:1]
        if len(places) == len(alike[0].ranks):
            return combine_norms(places)
    return None


def _encode(said: RankStatement, most: int, sums: int) -> list[int]:
    """int64 words; floats as their bits, and `most` bits that say what is computed. sums: how many
    a verdict has."""
    flags = _SUMMED * said.progress.is_summed | _INTACT * said.is_replica_intact
    flags |= _VERDICT * (said.verdict is not None) | _COUNTED * said.has_counts
    empty = [0] * (VERDICT_WORDS + sums)
    verdict = empty if said.verdict is None else verdict_words(said.verdict)
    added = struct.pack(f"{sums}d", *(said.sums or [0.0] * sums))
    applied = -1 if said.progress.applied_step is None else said.progress.applied_step
    numbers = struct.unpack("3q", struct.pack("3d", said.tokens, said.loss, said.squared_norm))
    stage = _STAGES.index(said.progress.stage)
    bits = sum(1 << leaf for leaf in said.computed_leaves)
    mask = [bits >> at & (1 << _BITS_PER_WORD) - 1 for at in range(0, most, _BITS_PER_WORD)]
    return [
        applied,
        stage,
        flags,
        *numbers,
        said.verdict_step,
        said.validated_step,
        *verdict,
        *struct.unpack(f"{sums}q", added),
        *mask,
    ]


def _decode(words: Sequence[int], sums: int) -> RankStatement:
    applied, stage, flags, tokens, loss, squares, step, validated, *rest = words
    size = VERDICT_WORDS + sums
    verdict, added, mask = rest[:size], rest[size : size + sums], rest[size + sums :]
    computed = tuple(
        _BITS_PER_WORD * at + bit
        for at, word in enumerate(mask)
        for bit in range(_BITS_PER_WORD)
        if word >> bit & 1
    )
    numbers = struct.unpack("3d", struct.pack("3q", tokens, loss, squares))
    return RankStatement(
        RankProgress(None if applied < 0 else applied, _STAGES[stage], bool(flags & _SUMMED)),
        bool(flags & _INTACT),
        verdict_from_words(verdict) if flags & _VERDICT else None,
        step,
        validated,
        bool(flags & _COUNTED),
        shortest(numbers[0]),
        numbers[1],
        numbers[2],
        computed,
        struct.unpack(f"{sums}d", struct.pack(f"{sums}q", *added)),
    )
