"""Recomputes steps of a run from its public record, and compares them with what the run recorded.

    start     the weights of the newest checkpoint before the step, or initial weights
    order     the samples that seed and dataset give the step, which the ledger must name
    compute   every step up to the one whose weights are recorded, in this process or in one for
              each rank of a replica
    compare   the ledger, loss, norm and rate of each step, and the weights at the end

On like processors all of it is equal bit by bit, however often the run was disturbed. Elsewhere the
distance is measured, and a bound judges it.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.api.replay_record import (
    PublicRecord,
    Stretch,
    plan_stretches,
    read_record,
    unlike_reasons,
)
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.loading.identity import config_hash, earlier_hash
from holdfast.config.run import RunConfig
from holdfast.config.sections.task import SCRIPT_TASK
from holdfast.core.data.learner_fates import LearnerFate, row_problems
from holdfast.core.data.skips import Skips
from holdfast.core.format.manifest import Commit
from holdfast.data.order.audit import audit_records
from holdfast.errors import CorruptError, DataError, HoldfastError, RunFolderError, UserError
from holdfast.events import ServerUpdates
from holdfast.launch.run.runs import Run
from holdfast.layout import Layout, Topology, place_replicas
from holdfast.report.formatting import format_plural
from holdfast.wire.store.run_location import store_of_run

if TYPE_CHECKING:
    from torch import Tensor

    from holdfast.core.sharding.boxes import Box
    from holdfast.training.engine.build import TrainingSession
    from holdfast.training.engine.state import LocalTensor

BOUNDS = {"float64": 1e-9, "fp32": 1e-4}
"""Largest relative distance on unlike processors, by train.precision."""
HALF_BOUND = 0.05  # of the other precisions
_COMPARED = ("loss", "tokens", "grad_norm", "learning_rate")
_MEETING_S = 120.0


@dataclass(frozen=True)
class ReplayProblem:
    """Something that a replay finds otherwise than it is recorded."""

    step: int
    kind: str  # ledger, curve, weights, record
    message: str


@dataclass(frozen=True)
class ReplayedStep:
    """A step that was asked for."""

    step: int
    start: int  # the state after this step was the start
    end: int  # after this step the weights were compared
    compared_with: str  # round, digest, checkpoint
    recorded: str  # SHA-256 of the recorded weights
    replayed: str  # SHA-256 of the weights here

    @property
    def is_equal(self) -> bool:
        return self.recorded == self.replayed


@dataclass
class ReplayResult:
    """What a replay found; `ok` if it may be the same run."""

    steps: list[ReplayedStep] = field(default_factory=list)
    problems: list[ReplayProblem] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)  # why bits need not be equal
    notes: list[str] = field(default_factory=list)
    computed: int = 0  # steps
    bound: float = 0.0  # of the relative distance, if bits need not be equal
    loss_distance: float = 0.0  # the largest relative one
    weight_distance: float | None = None  # the largest relative one; None: nothing to measure by

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok, "sentence": self.describe()}

    def describe(self) -> str:
        """Return the verdict in one sentence."""
        if self.problems:
            number = len(self.problems)
            found = "1 difference" if number == 1 else f"{number} differences; the first"
            return f"{found}: {self.problems[0].message}"
        equal = sum(step.is_equal for step in self.steps)
        what = f"{equal} of {len(self.steps)} hashes of the weights are equal"
        what += f" ({format_plural(self.computed, 'step')} computed)"
        if equal == len(self.steps) and not self.loss_distance:
            return f"{what}; every ledger entry, loss, norm and rate on the way too"
        measured = f"losses differ by {self.loss_distance:.1e} at most"
        if self.weight_distance is not None:
            measured += f", weights by {self.weight_distance:.1e}"
        return f"{what}; {measured} (relative; the bound is {self.bound:.0e})"


@dataclass(frozen=True)
class _Job:
    """One pass, for one rank. It travels to another process."""

    folder: Path
    config: RunConfig
    dataset: str
    stretch: Stretch
    layout: Layout
    skips: Skips
    threads: int
    topologies: Mapping[int, Topology]
    digests: Mapping[int, Mapping[tuple[int, int], str]]  # as `PublicRecord.digests`
    commits: Mapping[int, str]
    device: str
    updates: Mapping[int, ServerUpdates]  # as `PublicRecord.updates`
    vector_units: str  # that torch is asked for; "": it chooses
    rounds: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """round -> inner steps of each learner that its ledger has; none in mode fixed"""
    meeting: str = ""  # the file in which ranks meet; "": there is one rank


@dataclass
class _RankResult:
    """What one rank of a pass computed."""

    curve: dict[int, dict[str, float]] = field(default_factory=dict)  # step -> name -> value
    digests: dict[int, dict[tuple[int, int], str]] = field(default_factory=dict)
    rounds: dict[int, str] = field(default_factory=dict)  # round -> SHA-256 of all weights
    fates: dict[int, list[LearnerFate]] = field(default_factory=dict)  # round -> its ledger
    weights: dict[int, str] = field(default_factory=dict)  # step -> SHA-256, at a checkpoint
    stored: dict[int, str] = field(default_factory=dict)  # the same of the checkpoint
    differing: dict[int, list[str]] = field(default_factory=dict)  # step -> tensors
    squares: tuple[float, float] = (0.0, 0.0)  # sums of squares: of differences, of weights
    problem: tuple[int, str] | None = None  # step, why it could not be computed


def replay_steps(
    run: Run,
    steps: Sequence[int],
    *,
    dataset: str | None = None,
    bound: float | None = None,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> ReplayResult:
    """Recompute steps of a run. dataset: where its prepared data is now; None: where it was.

    Raises UserError for a run or a step that cannot be recomputed."""
    import torch

    _refuse(run)
    _refuse_missing_data(run, dataset)
    config, record = run.config, read_record(run)
    here_type = torch.accelerator.current_accelerator()
    device = "cpu" if here_type is None or here_type.type != config.device else config.device
    plan = plan_stretches(record, steps, run.place, to_checkpoint=False)
    generations = sorted({g for stretch in plan for g in record.generations(stretch)})
    threads = record.threads.get(generations[-1], 0) or torch.get_num_threads()
    here = _describe_here(device), threads, device
    result = ReplayResult(unlike=unlike_reasons(record, generations, config, here))
    result.bound = bound if bound is not None else BOUNDS.get(config.train.precision, HALF_BOUND)
    if result.unlike:
        plan = plan_stretches(record, steps, run.place, to_checkpoint=True)
    units = _units_of_run(record, generations, device)
    if units:
        result.notes.append(f"computed with the vector units of the run, {units}")
    total = sum(stretch.stop - stretch.start for stretch in plan)
    with closing(_Processes()) as processes:
        for stretch in plan:
            on_progress("steps", result.computed, total)
            job = _job(run, record, stretch, dataset, threads, device, units.lower())
            _judge(record, stretch, processes.compute(job), result)
            _audit_ledger(job, record, result)
            result.computed += stretch.stop - stretch.start
    result.problems.sort(key=lambda problem: (problem.step, problem.kind))
    return result


def _job(
    run: Run,
    record: PublicRecord,
    stretch: Stretch,
    dataset: str | None,
    threads: int,
    device: str,
    vector_units: str,
) -> _Job:
    one = record.replicas(record.generations(stretch))[0]
    layout = Layout.of_mesh(one.mesh_shape, one.stages, is_folded=one.is_folded)
    where = dataset or run.dataset_location
    return _Job(
        *(run.folder, run.config, where, stretch, layout, record.skips, threads),
        *(record.topologies, record.digests, record.commits, device, record.updates),
        vector_units,
        {step: tuple(r.steps for r in max(told, key=len)) for step, told in record.fates.items()},
    )


def _refuse(run: Run) -> None:
    """Raises RunFolderError for a run whose steps cannot be computed again."""
    why = ""
    if run.is_simulated:
        why = "this run was simulated, so it has no weights"
    elif run.config.rollout.is_on:
        why = "this run generated its data, and its record has no completions"
    elif run.config.task.name == SCRIPT_TASK:
        why = "the loop of this run is a script, which computes in its own order"
    if why:
        raise RunFolderError(why, where=run.place, remedy="name a run of a run file with its data")


def _refuse_missing_data(run: Run, dataset: str | None) -> None:
    """Raises DataError if the run's prepared dataset is not here."""
    from holdfast.data.stream.dataset_location import dataset_exists

    where = dataset or run.dataset_location
    if not run.config.has_own_data and not dataset_exists(where, run.config.data):
        raise DataError(
            "the prepared dataset of the run is not here",
            where=where,
            remedy="name its folder with --data",
        )


# --- computing ------------------------------------------------------------------------------
class _Processes:
    """Fresh processes that compute passes. The bits depend on settings that a process must make
    before its first product."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._pool: ProcessPoolExecutor | None = None
        self._size = 0

    def compute(self, job: _Job) -> list[_RankResult]:
        """Compute a pass on all ranks of one replica."""
        ranks = job.layout.world_size
        if self._pool is None or self._size != ranks:
            self.close()
            self._pool = ProcessPoolExecutor(ranks, mp_context=self._context)
            self._size = ranks
        with tempfile.TemporaryDirectory() as folder:
            if ranks > 1:
                job = replace(job, meeting=str(Path(folder) / "ranks"))
            waiting = [self._pool.submit(_compute_rank, job, rank) for rank in range(ranks)]
            return [future.result() for future in waiting]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _describe_here(device: str) -> str:
    import torch

    from holdfast.parallel.comm.devices import describe_processor
    from holdfast.training.engine.precision import same_products_on_any_threads

    same_products_on_any_threads()
    return describe_processor(torch.device(device))


def _units_of_run(record: PublicRecord, generations: Sequence[int], device: str) -> str:
    """Return the vector units with which torch computes as it did in the run. "": its own choice.

    A processor with AVX-512 has AVX2 too, and torch's kernels for AVX2 give the bits that they
    gave on a processor without AVX-512."""
    import torch

    from holdfast.core.devices import device_kind

    named = {name.split()[1] for g in generations for name in record.processors.get(g, ()) if name}
    here = torch.backends.cpu.get_cpu_capability()
    is_like = device_kind(device).is_host and named == {"AVX2"} and here == "AVX512"
    return "AVX2" if is_like else ""


def _compute_rank(job: _Job, rank: int) -> _RankResult:
    _use_settings_of_a_worker(job)
    result = _RankResult()
    step = job.stretch.start
    session: TrainingSession | None = None
    try:
        session = _open_session(job, rank)
        _load(job, session)
        step += 1
        for step in _train(job, session, result):
            _compare(job, session, rank, step, result)
            step += 1
    except UserError:
        raise
    except HoldfastError as error:
        result.problem = step, str(error)
    finally:
        if session is not None:
            session.close()
    return result


def _use_settings_of_a_worker(job: _Job) -> None:
    import torch

    from holdfast.core.devices import device_kind
    from holdfast.training.engine import precision

    precision.same_products_on_any_threads()
    if job.vector_units:
        os.environ.setdefault("ATEN_CPU_CAPABILITY", job.vector_units)
    train = job.config.train
    if not device_kind(job.device).is_host and train.deterministic:
        precision.same_kernels_each_time(compiled=train.compile)
    torch.set_num_threads(job.threads)


def _open_session(job: _Job, rank: int) -> TrainingSession:
    import torch

    from holdfast.core.devices import device_kind
    from holdfast.parallel.axes.process_groups import connect
    from holdfast.parallel.comm.devices import select_device
    from holdfast.parallel.torch_compat import file_store, memory_store
    from holdfast.plan.placing.planner import dealer_of
    from holdfast.tasks.choose import open_task
    from holdfast.training.engine.build import build_engine, connect_settings, make_session
    from holdfast.training.engine.free_learners import FreeLearnerExecutor
    from holdfast.training.engine.server_steps import ServerExecutor

    config, device = job.config, torch.device(device_kind(job.device).device(rank))
    select_device(device)
    task = open_task(config, device)
    batches = task.open_batches(job.dataset)
    batches.skips = job.skips
    size = job.layout.world_size
    store = file_store(Path(job.meeting), size) if job.meeting else memory_store()
    settings = connect_settings(config, store, device, _MEETING_S)
    topology = place_replicas([job.layout], 1, ("replay",) * size)
    groups = connect(settings, topology, rank)
    dealer = dealer_of(topology, config.layout.schedule)
    engine = build_engine(config, groups, device, dealer=dealer, task=task)
    if isinstance(engine.learners, ServerExecutor):
        engine.learners.recorded = job.updates
    if isinstance(engine.learners, FreeLearnerExecutor):
        engine.learners.recorded = job.rounds
    return make_session(config, engine, batches, device, task)


def _load(job: _Job, session: TrainingSession) -> None:
    """Fill the session with the state that a pass begins from. Raises CorruptError."""
    if job.stretch.key is None:
        session.engine.initialise(job.config.seed)
        return
    checkpoint = Checkpoint.open(store_of_run(job.folder), job.stretch.key)
    _refuse_other_config(checkpoint.commit, job.config)
    session.engine.load(_Reader(checkpoint))
    session.engine.set_applied_step(job.stretch.start)


def _refuse_other_config(commit: Commit, config: RunConfig) -> None:
    if commit.config_hash not in (config_hash(config), earlier_hash(config)):
        raise CorruptError(
            f"the configuration in resolved.json is not that of the checkpoint of step "
            f"{commit.step}, which names {commit.config_hash}"
        )


def _train(job: _Job, session: TrainingSession, result: _RankResult) -> Iterator[int]:
    """Yield each step once it is applied."""
    engine = session.engine
    with session.loader(job.stretch.start) as loader:
        for share in engine.order_shares(loader):
            engine.begin(share.step)
            engine.compute(share.microbatches)
            rate = engine.apply(engine.reduce())
            _, verdict = engine.history.applied_verdicts[-1]
            values = verdict.mean_loss, verdict.tokens, engine.mean_norm(verdict), rate
            result.curve[share.step] = dict(zip(_COMPARED, values, strict=True))
            yield share.step
            if share.step >= job.stretch.stop:
                return


@dataclass(frozen=True)
class _Reader:
    """Fills tensors from a checkpoint."""

    checkpoint: Checkpoint

    def __call__(self, box: Box, out: Tensor) -> None:
        import torch

        self.checkpoint.read(box, out.reshape(-1).view(torch.uint8).numpy().data)


def _compare(
    job: _Job, session: TrainingSession, rank: int, step: int, result: _RankResult
) -> None:
    """Hash the weights after a step as the run did, and compare them with its checkpoint."""
    from holdfast.training.engine.weights_digest import WeightsDigester, digest_of_weights

    state = session.engine.state()
    if session.engine.learners is not None:
        result.rounds[step] = digest_of_weights(job.config, state)
        result.fates[step] = list(session.engine.learners.fates)
    if recorded := job.digests.get(step):
        found = result.digests.setdefault(step, {})
        for generation, of_rank in recorded:
            topology = job.topologies.get(generation)
            if topology is None or not _holds(job.layout, rank, topology, of_rank):
                continue
            found[generation, of_rank] = WeightsDigester(job.config, topology).digest(
                of_rank, state
            )
    if step not in job.commits or step == job.stretch.start:
        return
    checkpoint = Checkpoint.open(store_of_run(job.folder), job.commits[step])
    stored = [_stored(checkpoint, local) for local in state]
    digester = WeightsDigester(job.config, session.groups.topology)
    result.weights[step] = digester.digest(rank, state)
    result.stored[step] = digester.digest(rank, stored)
    _measure(state, stored, step, result)


def _holds(layout: Layout, rank: int, topology: Topology, of_rank: int) -> bool:
    """Return True if a rank of the replay has what a rank of the run owned."""
    if layout.world_size == 1:
        return True
    same = topology.replica_of(of_rank).kind == layout.kind
    return same and topology.coordinate(of_rank).mesh_rank == rank


def _stored(checkpoint: Checkpoint, local: LocalTensor) -> LocalTensor:
    import torch

    tensor = torch.empty(local.tensor.shape, dtype=local.tensor.dtype)
    if tensor.numel():
        _Reader(checkpoint)(local.box, tensor)
    return replace(local, tensor=tensor)


def _measure(
    state: Sequence[LocalTensor], stored: Sequence[LocalTensor], step: int, result: _RankResult
) -> None:
    from holdfast.core.sharding.state_table import MODEL_PREFIX
    from holdfast.training.engine.replica_check import box_bytes

    far, size = result.squares
    for here, there in zip(state, stored, strict=True):
        if here.tensor.numel() and box_bytes(here, here.box) != box_bytes(there, there.box):
            result.differing.setdefault(step, []).append(here.name)
        if here.name.startswith(MODEL_PREFIX):
            left, right = here.tensor.detach().cpu().double(), there.tensor.double()
            far += float((left - right).square().sum())
            size += float(right.square().sum())
    result.squares = far, size


# --- judging --------------------------------------------------------------------------------
def _judge(
    record: PublicRecord, stretch: Stretch, ranks: Sequence[_RankResult], result: ReplayResult
) -> None:
    """Compare what the ranks computed with the record."""
    for rank in ranks:
        if rank.problem is not None:
            step, why = rank.problem
            message = f"step {step}: it cannot be computed from the record: {why}"
            result.problems.append(ReplayProblem(step, "record", message))
            return
    for step in range(stretch.start + 1, stretch.stop + 1):
        _judge_curve(record, step, ranks[0].curve.get(step, {}), result)
        for told in record.fates.get(step, ()):
            for message in row_problems(told, ranks[0].fates.get(step, [])):
                _note(result, step, "ledger", message)
    hashes: dict[int, tuple[str, str, str]] = {}
    for step in range(stretch.start + 1, stretch.stop + 1):
        for kind, recorded, replayed, tensors in _hashes(record, step, ranks):
            if kind == "checkpoint" or step in record.digested:
                hashes.setdefault(step, (kind, recorded, replayed))
            if recorded != replayed or tensors:
                named = f" ({', '.join(tensors[:3])})" if tensors else ""
                _note(
                    result,
                    *(step, "weights"),
                    f"the {'weights' if recorded != replayed else 'optimizer state'} after it are "
                    f"not those of its {kind}{named}",
                    is_equality=True,
                )
    far = sum(rank.squares[0] for rank in ranks)
    size = sum(rank.squares[1] for rank in ranks)
    if size:
        distance = math.sqrt(far / size)
        result.weight_distance = max(result.weight_distance or 0.0, distance)
        if result.unlike and not distance <= result.bound:
            message = f"weights differ by {distance:.1e}, and the bound is {result.bound:.0e}"
            _note(result, stretch.stop, "weights", message)
    for step in stretch.wanted:
        end = min((at for at in hashes if at >= step), default=None)
        if end is not None:
            result.steps.append(ReplayedStep(step, stretch.start, end, *hashes[end]))


def _hashes(
    record: PublicRecord, step: int, ranks: Sequence[_RankResult]
) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield (kind, recorded, replayed, differing tensors) of what tells the weights of a step."""
    if recorded_hashes := record.rounds.get(step):
        yield "round", _joined(sorted(recorded_hashes)), ranks[0].rounds[step], []
    found = {key: value for rank in ranks for key, value in rank.digests.get(step, {}).items()}
    if found:
        recorded = record.digests[step]
        keys = sorted(found)
        yield "digest", _joined([recorded[k] for k in keys]), _joined([found[k] for k in keys]), []
    if any(step in rank.stored for rank in ranks):
        stored, here = ([getattr(r, name)[step] for r in ranks] for name in ("stored", "weights"))
        tensors = sorted({name for rank in ranks for name in rank.differing.get(step, [])})
        yield "checkpoint", _joined(stored), _joined(here), tensors


def _joined(digests: Sequence[str]) -> str:
    """Return one hash for the hashes of several ranks."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _judge_curve(
    record: PublicRecord, step: int, here: Mapping[str, float], result: ReplayResult
) -> None:
    if step not in record.done:
        note = f"the journal does not tell of step {step}"
        return _note(result, step, "curve", note)
    _, done = record.done[step]
    there = {name: float(getattr(done, name)) for name in _COMPARED}
    for name, value in there.items():
        if here[name] == value or (math.isnan(here[name]) and math.isnan(value)):
            continue
        distance = abs(here[name] - value) / (abs(value) or 1.0)
        message = f"{name} is {here[name]!r}, and the journal has {value!r}"
        if not result.unlike:
            _note(result, step, "curve", message)
        elif name == "loss":
            result.loss_distance = max(result.loss_distance, distance)
            if not distance <= result.bound:
                _note(result, step, "curve", message)
        elif name == "tokens":
            _note(result, step, "curve", message)
    return None


def _note(
    result: ReplayResult, step: int, kind: str, message: str, *, is_equality: bool = False
) -> None:
    """Note a problem; one of equality is none if the bits need not be equal."""
    if not (is_equality and result.unlike):
        result.problems.append(ReplayProblem(step, kind, f"step {step}: {message}"))


def _audit_ledger(job: _Job, record: PublicRecord, result: ReplayResult) -> None:
    """Compare the ledger of a pass with what the dataset and the seed give its steps."""
    from holdfast.tasks.choose import open_task

    batches: Any = open_task(job.config).open_batches(job.dataset)
    batches.skips = job.skips
    first, last = job.stretch.start + 1, job.stretch.stop
    found = audit_records(record.records, batches, last, first_step=first)
    for problem in found.problems:
        result.problems.append(ReplayProblem(problem.step, "ledger", problem.message))
    for step in range(first, last + 1):
        for microbatch, reason in record.skipped(step).items():
            if not job.skips.reason(step, microbatch):
                message = f"the ledger calls microbatch {microbatch} skipped ({reason}), and the "
                _note(result, step, "ledger", message + "run's list of skips does not have it")
