"""From a run file and a place in a topology to everything that the training loop needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from typing import Any, cast

import torch
from torch import nn

from holdfast.config.run import RunConfig
from holdfast.config.sections.memory import DEVICE
from holdfast.core.devices import device_kind, run_device_kind
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.fragments import fragment_of
from holdfast.core.sharding.parameters import Parameter
from holdfast.core.sharding.reduction_tree import deal
from holdfast.core.sharding.run_table import run_cells, run_parameter_table, run_parameters
from holdfast.core.sharding.state_table import mesh_box
from holdfast.layout import Topology
from holdfast.options.registry import hooks, run_hooks
from holdfast.parallel.axes.expert_parallel import shared_experts
from holdfast.parallel.axes.partitioned_input import PartitionedInput
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.parallel.axes.replica_groups import ConnectSettings
from holdfast.parallel.axes.replicated import ReplicatedGradients
from holdfast.parallel.axes.zero1 import OwnedRows
from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.parallel.comm.trace import SpanRecorder
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.gradients.cell_team import CellTeam
from holdfast.parallel.gradients.feeder import Cells, GradientFeeder
from holdfast.parallel.torch_compat import (
    Store,
    give_memory,
    give_shards_memory,
    is_plain,
    local_tensor,
    place_shards,
)
from holdfast.training.engine.checked_learners import CheckedLearners
from holdfast.training.engine.engine import GradientFeed, StepEngine
from holdfast.training.engine.evaluate import Evaluator
from holdfast.training.engine.fragments import FragmentGradients
from holdfast.training.engine.free_learners import FreeLearnerExecutor
from holdfast.training.engine.learners import FragmentsOfAll, GradientsOfAll, LearnerExecutor
from holdfast.training.engine.loss_scale import LossScale
from holdfast.training.engine.objective import NextTokenObjective
from holdfast.training.engine.precision import Precision
from holdfast.training.engine.protocols import LearnerStates, ShareLoader
from holdfast.training.engine.server_steps import ChangeOfStep, ServerExecutor
from holdfast.training.engine.state import Parameters
from holdfast.training.engine.step_plan import Dealer
from holdfast.training.engine.task import DecoderTask, EngineTask, TaskBatchSource
from holdfast.training.memory.activations import move_activations
from holdfast.training.memory.float8 import apply_float8
from holdfast.training.memory.places import StateMemory
from holdfast.training.memory.recompute import apply_recompute
from holdfast.training.memory.tensor_account import PassMeter


@dataclass
class TrainingSession:
    """One rank of one generation, ready for its state: call `engine.initialise(config.seed)` or
    `engine.load(read)`, then `loader(start_step)`, then `runner.TrainingLoop.run`."""

    config: RunConfig
    engine: StepEngine
    evaluator: Evaluator
    groups: ProcessGroups
    device: torch.device
    batches: TaskBatchSource
    task: EngineTask

    def loader(self, start_step: int) -> ShareLoader:
        """This rank's shares from step `start_step` + 1 to the last; it reads ahead at once."""
        place = self.groups.coordinate
        return self.task.loader(
            self.batches,
            self.engine.plan.share,
            part=place.dp_shard,
            parts=self.groups.degree("dp_shard"),
            first_step=start_step + 1,
            last_step=self.config.train.steps,
            device=self.device,
        )

    def microbatch(self, step: int, index: int) -> Any:
        """One microbatch of a step, whichever rank has it in its share."""
        steps = {"first_step": step, "last_step": step}
        whole = {"part": 0, "parts": 1, "device": self.device}
        with self.task.loader(self.batches, lambda _: (index,), **steps, **whole) as loader:
            return next(loader).microbatches[0]

    def close(self) -> None:
        """Leave the generation in an orderly way."""
        self.engine.close()


def connect_settings(
    config: RunConfig, store: Store, device: torch.device, seconds: float
) -> ConnectSettings:
    """How the run file wants groups to be joined. Gradients travel as messages over gloo, and as
    collectives over a device's own backend, whose messages would go through the host's memory."""
    exchange, kind = config.layout.exchange, run_device_kind(config, device.type)
    if exchange == "auto":
        exchange = "direct" if kind.between_has_tags else "gathered"
    recorder = SpanRecorder(device) if config.layout.has_traces else None
    return ConnectSettings(
        store,
        device,
        seconds,
        config.cluster.gloo_device,
        traffic=TrafficCounter(recorder) if device.type == "cpu" else None,
        recorder=recorder,
        exchange=exchange,
        ep=config.layout.ep,
        is_staged=kind.is_staged,
    )


def make_session(
    config: RunConfig,
    engine: StepEngine,
    batches: TaskBatchSource,
    device: torch.device,
    task: EngineTask | None = None,
) -> TrainingSession:
    """An engine with its data and its evaluation. task: what is trained; None: the decoder."""
    task = DecoderTask(config) if task is None else task
    groups = engine.groups
    validation = task.validation(batches, config.train.evaluate.samples)
    evaluator = Evaluator(engine.objective, engine.executor, groups, validation, device)
    session = TrainingSession(config, engine, evaluator, groups, device, batches, task)
    if isinstance(engine.learners, CheckedLearners):
        engine.learners.fetch = session.microbatch
    return session


def build_engine(
    config: RunConfig,
    groups: ProcessGroups,
    device: torch.device,
    *,
    dealer: Dealer = deal,
    task: EngineTask | None = None,
) -> StepEngine:
    """Model, optimizer and reducer for one rank, without data. task: what is trained; None: the
    decoder.

    The model is built in full on the meta device. It is cut down to this rank's stage and to its
    part of each tensor, and only then given memory.
    """
    task = DecoderTask(config) if task is None else task
    precision = Precision.of(config.train.precision)
    objective = task.objective(groups)
    objective.to(precision.state)
    units = task.units(objective)
    if precision.has_float8:
        apply_float8(units, is_emulated=not device_kind(device.type).float8_capability)
    for change_units in run_hooks(config, lambda effect: effect.units):
        change_units(config, units)
    label, movable = f"{config.name}-rank{groups.rank}", config.train.movable_state
    memory = StateMemory(config.train.memory, device, label, movable)
    _prepare_units(config, groups, units, objective, memory)
    is_cut = groups.degree("dp_shard") > 1 and config.layout.zero_in_memory > 1
    make = _sharded if is_cut else _unsharded
    parameters, feed = make(_Parts(config, task, groups, device, precision, memory), objective)
    executor = task.executor(objective, groups, precision.compute, device)
    layout, named = config.layout, partial(task.named_parameters, objective)
    learners: LearnerStates | None = None
    if config.outer.is_on:
        inner, working = _inner_sum(config, task, groups, parameters, objective)
        found = config, groups, executor, inner, parameters, working, task.user_parts
        make_learners: type[LearnerExecutor] = LearnerExecutor
        if config.outer.is_free or config.outer.trust.is_on:  # one refuses the other
            make_learners = FreeLearnerExecutor if config.outer.is_free else CheckedLearners
        executor = learners = make_learners(*found)
        dealer = deal  # as the state of learners is placed
    if config.server.is_on:
        inner, _ = _inner_sum(config, task, groups, parameters, objective)
        executor = learners = ServerExecutor(config, executor, inner, parameters, task.user_parts)
    for wrap in hooks("layout", layout, lambda effect: effect.executor):
        executor, parameters = wrap(config, executor, parameters, named)
    # Tokens of a microbatch, or its samples if a task of the user counts.
    tokens = config.step_train.microbatch_size
    counts_tokens = not config.task.name and not config.objective.counts
    tokens *= config.data.sequence_length if counts_tokens else 1
    engine = StepEngine(
        objective,
        executor,
        parameters,
        feed,
        groups,
        config.step_train,
        device,
        dealer,
        task.user_parts,
        LossScale(tokens, device, is_dynamic=precision.scales_loss),
        config.rollout.lag if config.rollout.is_on else 0,
        learners,
    )
    if isinstance(learners, LearnerExecutor):
        learners.step = lambda: engine.step
    if isinstance(learners, ServerExecutor):
        learners.connect(engine)
    engine.counts = config.objective.counts
    if memory.ledger.limit > 0 and not (config.train.compile and device.type == "cpu"):
        engine.measure_passes = PassMeter(memory).measured
    for change in run_hooks(config, lambda effect: effect.engine):
        change(config, engine)
    if not memory.stages_updates:
        memory.count("optimizer", (t for slot in engine.optimizer.slots for t in slot.tensors))
    return engine


def _inner_sum(
    config: RunConfig,
    task: EngineTask,
    groups: ProcessGroups,
    parameters: Parameters,
    objective: nn.Module,
) -> tuple[ReplicatedGradients, list[torch.Tensor]]:
    """What sums gradients on this rank alone, by the same tree over microbatches; and the weights
    that learners update."""
    named, teams = task.named_parameters(objective), _cells_alone(config, groups)
    boxes = {box.name: box for box in parameters.boxes}
    dtype, working = parameters.master_tensors[0].dtype, parameters.compute_tensors
    bucket_bytes = int(config.layout.bucket_mb * 1e6)
    inner = ReplicatedGradients(named, boxes, teams, dtype=dtype, bucket_bytes=bucket_bytes)
    if working[0].dtype != dtype:
        working = [torch.zeros_like(master) for master in parameters.master_tensors]
    return inner, working


def _cells_alone(config: RunConfig, groups: ProcessGroups) -> Cells:
    """The cells of this rank as if there were no other replica."""
    alone = replace(groups.replica, index=0, ranks=(0,))
    topology = Topology(groups.topology.generation, (alone,), ("",))
    peers, cells = PeerGroup(groups.settings.store, "", 0, 1), run_cells(config, topology, 0)
    return [(cell, CellTeam(peers, cell.members, 0, (0,))) for cell in cells]


def _prepare_units(
    config: RunConfig,
    groups: ProcessGroups,
    units: Sequence[nn.Module],
    objective: nn.Module,
    memory: StateMemory,
) -> None:
    """Let units be compiled, and run again in the backward pass, and what they keep be moved, as
    the run file says."""
    moves, stage = memory.config.moves_activations, groups.coordinate.pp
    policy = config.recompute_policy(stage, groups.degree("pp"), groups.degree("tp"))
    if policy.word != "none":
        is_random = bool(config.task.name or config.lora.dropout)
        make = partial(apply_recompute, is_random=is_random, is_compiled=config.train.compile)
        first = 0  # of the units whose input can be cut
        if policy.input_parts > 1:
            first = int(stage > 0)  # the stage holds all of what came in
            make(units[:first], policy)
            tensor = cast(NextTokenObjective, objective).tensor
            assert tensor is not None, "tp made it"
            make = partial(make, partition=PartitionedInput(tensor.collectives))
        make(units[first:], policy)
    elif config.train.compile and not moves:
        for unit in units:
            unit.compile()
    if moves:
        is_plain = policy.word == "none"
        move_activations(units, memory, is_compiled=config.train.compile and is_plain)


@dataclass(frozen=True)
class _Parts:
    """What a rank's engine is built from."""

    config: RunConfig
    task: EngineTask
    groups: ProcessGroups
    device: torch.device
    precision: Precision
    memory: StateMemory

    def make_sum(self, elements: int) -> torch.Tensor:
        """Memory for a sum of gradients, in their place."""
        return self.memory.zeros("gradients", [(elements,)], self.precision.state)[0]

    def boxes(self, names: Sequence[str], *, sharded: bool) -> dict[str, Box]:
        """What this rank has of some parameters, by dp_shard's cut too or only by those before."""
        rows = {row.name: row for row in run_parameter_table(self.config)}
        if not sharded:
            rows = {name: replace(row, shard_dim=None) for name, row in rows.items()}
        place = self.groups.replica, self.groups.coordinate
        return {name: mesh_box(rows[name], *place) for name in names}

    def rows_on_rank(self, objective: nn.Module) -> Table:
        """The rows, boxes and parameters that this rank has, in the order of the table."""
        named = self.task.named_parameters(objective)
        table = tuple(row for row in run_parameters(self.config) if row.name in named)
        if [row.name for row in table] != list(named):
            raise RuntimeError(f"the model has {list(named)}, its table {[r.name for r in table]}")
        return table, self.boxes(list(named), sharded=True), named


def _all_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, and buffers such as the base of adapters."""
    return chain(module.parameters(), module.buffers())


BuiltParameters = tuple[Parameters, GradientFeed]


def _unsharded(parts: _Parts, objective: nn.Module) -> BuiltParameters:
    """This stage's part of the model on this device. In mixed precision the module computes on
    bf16 copies. ZeRO 1, and ZeRO 2 that adds up gradients once a step, train and save this rank's
    part of the rows."""
    precision, memory, groups = parts.precision, parts.memory, parts.groups
    give_memory(objective.to(precision.compute), parts.device)
    parts.task.fill_constants(objective, parts.device)
    table, boxes, named = parts.rows_on_rank(objective)
    memory.count("parameters", _all_tensors(objective))
    lengths, initial = tuple(boxes.values()), parts.task.initial_values
    if groups.degree("dp_shard") > 1:
        whole = parts.boxes(list(named), sharded=False)
        rows = OwnedRows(
            named,
            whole,
            boxes,
            groups.axis("dp_shard"),
            state=precision.state,
            traffic=groups.traffic,
            make_masters=partial(memory.zeros, "optimizer"),
        )
        if memory.ledger.limit:  # with a limit, all that the device holds is counted
            memory.ledger.add(DEVICE, "messages", rows.waiting_bytes)
        feed = _replicated_feed(parts, named, whole, wanted=boxes)
        trained = rows.master_tensors
        return Parameters(table, lengths, trained, initial, [], rows.gather, memory), feed
    trained = [p.data for p in named.values()]  # an update of them is not seen by a graph
    computed: list[torch.Tensor] = []
    if precision.mixed or parts.config.computes_apart:
        computed = trained
        shapes = [tuple(p.shape) for p in computed]
        trained = memory.zeros("optimizer", shapes, precision.state)
    feed = _replicated_feed(parts, named, boxes)
    return Parameters(table, lengths, trained, initial, computed, memory=memory), feed


def _replicated_feed(
    parts: _Parts,
    named: Mapping[str, torch.Tensor],
    boxes: Mapping[str, Box],
    wanted: Mapping[str, Box] | None = None,
) -> GradientFeed:
    """Sum the gradients of plain parameters. wanted: the parts of `boxes` that this rank trains."""
    config = parts.config

    gradients: Callable[..., ReplicatedGradients]
    gradients = GradientsOfAll if config.outer.sends_all else ReplicatedGradients
    if config.outer.fragments > 1:
        made = FragmentsOfAll if config.outer.sends_all else FragmentGradients
        numbers = fragment_of(run_parameters(config), config.outer.fragments)
        gradients = partial(made, numbers=numbers)
    if config.server.is_on:
        gradients = ChangeOfStep

    def feeder(cells: Cells, by_unit: bool) -> GradientFeeder:
        return gradients(
            named,
            boxes,
            cells,
            dtype=parts.precision.state,
            wanted=wanted,
            by_unit=by_unit,
            buffers=parts.make_sum,
            may_hold_leaf=parts.memory.place_of("gradients") == DEVICE
            and not config.computes_apart,
            fast=config.layout.reduction == "fast",
            bucket_bytes=int(config.layout.bucket_mb * 1e6),
        )

    return _gradient_feed(parts, feeder)


def _sharded(parts: _Parts, objective: nn.Module) -> BuiltParameters:
    """A shard of that by FSDP2 (ZeRO 3, and 2 if it adds up gradients after each microbatch),
    which makes the bf16 copies itself."""
    # Imported only if needed: FSDP2 brings DTensor and sympy, a second of a process's start.
    # (`elastic.protocol.worker_spec.modules_to_preload` has the fork server import it where the run
    # file shards).
    from holdfast.parallel.axes.fsdp import NO_CODES, ShardedGradients, apply_fsdp

    config, precision = parts.config, parts.precision
    compute = precision.compute if precision.mixed else None
    blocks = parts.task.units(objective)
    moved, mesh = (
        parts.memory.place_of("parameters") != DEVICE,
        parts.groups.replica_groups.shard_mesh(),
    )
    how = compute, config.layout.zero
    unshared: set[nn.Parameter] = set()
    for each in shared_experts(objective, parts.groups):
        experts = parts.groups.replica_groups.expert_mesh()
        if experts.size() == 1 and compute is None and not moved:  # then FSDP2 would only copy
            unshared.update(each.parameters())
        else:
            apply_fsdp(each, (), experts, *how, is_offloaded=moved)
    apply_fsdp(objective, blocks, mesh, *how, is_offloaded=moved, unshared=unshared)
    give_shards_memory(objective, torch.device("cpu") if moved else parts.device)
    if moved:
        place_shards(objective, partial(parts.memory.zeros, "parameters"))
    parts.task.fill_constants(objective, parts.device)
    table, boxes, named = parts.rows_on_rank(objective)
    traffic = parts.groups.traffic
    make_codes = hooks("layout", config.layout, lambda effect: effect.shard_codes)
    codes = make_codes[0](config.layout) if make_codes else NO_CODES

    def feeder(cells: Cells, by_unit: bool) -> GradientFeeder:
        assert by_unit, "FSDP2 produces gradients by unit"
        return ShardedGradients(
            objective,
            named,
            boxes,
            cells,
            dtype=precision.state,
            fast=config.layout.reduction == "fast",
            traffic=traffic,
            buffers=parts.make_sum,
            are_sums_here=parts.memory.place_of("gradients") == DEVICE,
            codes=codes,
        )

    held = [local_tensor(p) for p in named.values()]
    if not moved:
        parts.memory.count("parameters", map(local_tensor, _all_tensors(objective)))
    if config.layout.zero == 2 and not parts.memory.ledger.limit:
        # What stays gathered between the two passes. With a limit it counts with the passes.
        elements = sum(prod(p.shape) for p in named.values() if not is_plain(p))
        parts.memory.ledger.add(DEVICE, "gathered", elements * precision.compute.itemsize)
    initial, lengths = parts.task.initial_values, tuple(boxes.values())
    parameters = Parameters(table, lengths, held, initial, [], memory=parts.memory)
    return parameters, _gradient_feed(parts, feeder)


def _gradient_feed(parts: _Parts, make: Callable[[Cells, bool], GradientFeeder]) -> GradientFeed:
    """See `engine.GradientFeed`. make: from the cells of a rank, and whether buckets are blocks."""
    config = parts.config

    def feed(groups: ProcessGroups, old: GradientFeeder | None) -> GradientFeeder:
        cells, by_unit = run_cells(config, groups.topology, groups.rank), _by_unit(config, groups)
        if config.server.is_on and old is not None:
            return old
        if config.outer.sends_all or config.server.is_on:  # no sum travels
            return make(_cells_alone(config, groups), by_unit)
        joined = list(zip(cells, groups.teams(cells), strict=True))
        if old is not None and old.regroup(joined, by_unit):
            return old
        parts.memory.forget("gradients")
        return make(joined, by_unit)

    return feed


def _by_unit(config: RunConfig, groups: ProcessGroups) -> bool:
    """Whether some replica's gradients come by FSDP2's units, or from several stages of a rank:
    then all reduce by unit."""
    replicas = groups.topology.replicas
    shards = max(replica.degree("dp_shard") for replica in replicas)
    has_stages = any(len(replica.stages) > replica.degree("pp") for replica in replicas)
    return has_stages or (shards > 1 and config.layout.zero_in_memory > 1)


Table = tuple[tuple[Parameter, ...], dict[str, Box], Mapping[str, torch.Tensor]]
