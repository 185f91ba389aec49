"""What a run folder says of its steps: the public record that a replay is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from holdfast.checkpoint.restore.catalog import step_of
from holdfast.config.run import RunConfig
from holdfast.core.data.data_ledger import LedgerEntry
from holdfast.core.data.learner_fates import LearnerFate, read_fates
from holdfast.core.data.lineage import split_effective
from holdfast.core.data.skips import Skips
from holdfast.elastic.protocol.generation_record import record_of
from holdfast.errors import CorruptError, RunFolderError
from holdfast.events import (
    BatchFed,
    GenerationStarted,
    OuterRound,
    Record,
    RunBranched,
    ServerUpdates,
    StepDone,
    WeightsDigest,
    WorkerReady,
)
from holdfast.launch.run.resume_checks import usable_commits
from holdfast.launch.run.runs import Run
from holdfast.layout import MeshShape, Replica, Topology
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import MissingKeyError
from holdfast.wire.term import newest_generation


@dataclass(frozen=True)
class Stretch:
    """Steps that are computed in one pass."""

    start: int  # from the state after this step
    key: str | None  # of the commit object of that state; None: initial weights
    stop: int  # the last step, after which the weights are recorded
    wanted: tuple[int, ...]  # the steps that were asked for


@dataclass
class PublicRecord:
    """The steps that count, by number, and what the run wrote of each."""

    records: list[Record]  # that count, in order
    commits: dict[int, str]  # step -> key, of usable checkpoints
    skips: Skips
    first_step: int  # the first that this run computed itself
    done: dict[int, tuple[int, StepDone]] = field(default_factory=dict)  # step -> generation, event
    digests: dict[int, dict[tuple[int, int], str]] = field(default_factory=dict)
    """step -> (generation, rank) -> SHA-256 of what that rank owns of the weights"""
    digested: set[int] = field(default_factory=set)  # steps with the digests of all weights
    rounds: dict[int, set[str]] = field(default_factory=dict)
    """round of learners -> SHA-256 of all weights, as its ranks have it"""
    fates: dict[int, list[list[LearnerFate]]] = field(default_factory=dict)
    """round of outer.mode free -> its ledger, as its ranks have it; [] cannot be read"""
    topologies: dict[int, Topology] = field(default_factory=dict)  # by generation
    processors: dict[int, set[str]] = field(default_factory=dict)  # by generation
    updates: dict[int, ServerUpdates] = field(default_factory=dict)  # by step
    threads: dict[int, int] = field(default_factory=dict)  # by generation
    devices: dict[int, str] = field(default_factory=dict)  # by generation: its type

    @property
    def last_step(self) -> int:
        return max(self.done, default=0)

    def generations(self, stretch: Stretch) -> list[int]:
        """Return the generations that computed steps of a stretch."""
        steps = range(stretch.start + 1, stretch.stop + 1)
        return sorted({self.done[step][0] for step in steps if step in self.done})

    def replicas(self, generations: Iterable[int]) -> list[Replica]:
        """Return one replica of each kind, the most common first."""
        found = [
            r for g in generations if g in self.topologies for r in self.topologies[g].replicas
        ]
        kinds = [replica.kind for replica in found]
        by_kind = {replica.kind: replica for replica in reversed(found)}
        return sorted(by_kind.values(), key=lambda r: -kinds.count(r.kind))

    def skipped(self, step: int) -> dict[int, str]:
        """Return microbatch -> reason of what the ledger calls skipped in a step."""
        entries = [
            LedgerEntry.from_json(step, record.event.rank, value)
            for record in self.records
            if isinstance(record.event, BatchFed) and record.event.step == step
            for value in record.event.entries
        ]
        return {entry.microbatch: entry.skip_reason for entry in entries if entry.skip_reason}


def read_record(run: Run) -> PublicRecord:
    """Read the journal and the list of checkpoints of a run. Raises RunFolderError."""
    from holdfast.training.engine.weights_digest import WeightsDigester  # brings torch

    effective, _ = split_effective(read_journal(run.store))
    commits = {step_of(key): key for key in reversed(usable_commits(run.store))}
    skips = Skips()
    if newest := newest_generation(run.store):
        with suppress(MissingKeyError, CorruptError):
            skips = record_of(run.store, newest).skips
    first = 1 + max(
        (r.event.step for r in effective if isinstance(r.event, RunBranched)), default=0
    )
    found = PublicRecord(effective, commits, skips, first)
    for record in effective:
        _note(found, record)
    owners: dict[int, frozenset[int]] = {}  # by generation
    for step, digests in found.digests.items():
        for generation in {generation for generation, _ in digests} & found.topologies.keys():
            if generation not in owners:
                digester = WeightsDigester(run.config, found.topologies[generation])
                owners[generation] = digester.owners
            if all((generation, rank) in digests for rank in owners[generation]):
                found.digested.add(step)
    if not found.done:
        raise RunFolderError(
            "the journal tells of no step, so there is nothing to compare a replay with",
            where=run.place,
            remedy="name a run that was trained, with its journal",
        )
    return found


def _note(found: PublicRecord, record: Record) -> None:
    event, generation = record.event, record.generation
    match event:
        case StepDone():
            found.done[event.step] = generation, event
        case ServerUpdates():
            found.updates[event.step] = event
        case WeightsDigest():
            found.digests.setdefault(event.step, {})[generation, event.rank] = event.sha256
        case OuterRound():
            found.rounds.setdefault(event.step, set()).add(event.sha256)
            found.digested.add(event.step)
            rows = read_fates(event.fates)
            if event.fates and rows not in (told := found.fates.setdefault(event.step, [])):
                told.append(rows)
        case GenerationStarted():
            with suppress(KeyError, TypeError, ValueError):
                found.topologies[generation] = Topology.from_json(event.topology)
        case WorkerReady():
            found.processors.setdefault(generation, set()).add(event.processor)
            found.threads[generation] = event.threads
            found.devices[generation] = event.device.partition(",")[0].partition(":")[0] or "cpu"


def plan_stretches(
    record: PublicRecord, steps: Sequence[int], place: str, *, to_checkpoint: bool
) -> list[Stretch]:
    """Return the passes that recompute `steps`, each from the newest checkpoint before it.

    to_checkpoint: end at a checkpoint if one follows, rather than at a digest. Raises
    RunFolderError for a step that the run has not done, or after which no weights are recorded.
    """
    starts = {0: None} if record.first_step == 1 else {}
    known: Mapping[int, str | None] = {**starts, **record.commits}
    passes: dict[int, Stretch] = {}
    for step in sorted(set(steps)):
        if not record.first_step <= step <= record.last_step:
            word = "round" if record.rounds else "step"
            raise RunFolderError(
                f"{word} {step} is none of this run, which did the {word}s {record.first_step} to "
                f"{record.last_step}",
                where=place,
                remedy=f"name one of these with --{word}",
            )
        start = max((at for at in known if at < step), default=None)
        following = min((at for at in record.commits if at >= step), default=None)
        digest = min((at for at in record.digested if at >= step), default=None)
        ends = [at for at in (following, digest) if at is not None]
        stop = following if to_checkpoint and following is not None else min(ends, default=None)
        if start is None or stop is None:
            side = "before" if start is None else "after"
            raise RunFolderError(
                f"no checkpoint and no digest tells what the weights were {side} step {step}",
                where=place,
                remedy="name a step between two checkpoints (holdfast checkpoint list RUN); "
                "train.digest_every records a digest in the next run",
            )
        old = passes.get(start)
        wanted = (*(old.wanted if old else ()), step)
        passes[start] = Stretch(start, known[start], max(stop, old.stop if old else 0), wanted)
    return list(passes.values())


def unlike_reasons(
    record: PublicRecord, generations: Sequence[int], config: RunConfig, here: tuple[str, int, str]
) -> list[str]:
    """Return why the bits of a replay need not be those of the run.

    here: the replay's processor, threads and type of device."""
    processor, threads, device = here
    said: set[str] = set().union(*(record.processors.get(g, {""}) for g in generations))
    reasons = [
        f"the run computed on {name or 'processors that its journal does not name'}, and this is "
        f"{processor}"
        for name in sorted(said - {processor})
    ]
    used = {record.devices.get(g, device) for g in generations} - {device}
    reasons += [f"the run computed on {name}, and this on {device}" for name in sorted(used)]
    kinds = record.replicas(generations)
    if len(kinds) > 1:
        meshes: list[MeshShape] = [replica.mesh_shape for replica in kinds]
        reasons.append(f"the layout changed on the way: replicas of {meshes}")
    if config.layout.reduction != "tree":
        reasons.append("layout.reduction is fast, so the run's own bits depend on its replicas")
    others = {record.threads.get(g, threads) for g in generations} - {threads}
    if others and config.train.precision not in ("fp32", "float64") and device == "cpu":
        reasons.append(f"{config.train.precision} on another number of threads")
    return reasons
