"""From a run file and a place in a topology to everything that the training loop needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from holdfast.config.run import RunConfig
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.parameters import Parameter, decoder_parameters
from holdfast.core.sharding.reduction_cells import Cell, reduction_cells
from holdfast.core.sharding.reduction_tree import deal
from holdfast.core.sharding.state_table import mesh_box, parameter_table
from holdfast.data.batch import Batches
from holdfast.data.loader import Loader
from holdfast.errors import ConfigError
from holdfast.layout import Topology
from holdfast.model.decoder import Decoder
from holdfast.model.stage import keep_stage
from holdfast.parallel.gradients.feeder import Cells, GradientFeeder
from holdfast.parallel.gradients.reducer import CellTeam
from holdfast.parallel.process_groups import ProcessGroups, connect
from holdfast.parallel.replicated import ReplicatedGradients
from holdfast.parallel.tensor_parallel import apply_tensor_parallel, localise_parameters
from holdfast.parallel.torch_compat import Store, give_memory, give_shards_memory, local_tensor
from holdfast.parallel.trace import SpanRecorder
from holdfast.parallel.zero1 import OwnedRows
from holdfast.train.engine import GradientFeed, GradientReducer, StepEngine
from holdfast.train.evaluate import Evaluator
from holdfast.train.executors import make_executor
from holdfast.train.objective import NextTokenObjective
from holdfast.train.precision import Precision
from holdfast.train.state import Parameters
from holdfast.train.step_plan import Dealer


@dataclass
class TrainingSession:
    """One rank of one generation, ready for its state: call `engine.initialise(config.seed)` or
    `engine.load(read)`, then `loader(start_step)`, then `runner.run_training`."""

    config: RunConfig
    engine: StepEngine
    evaluator: Evaluator
    groups: ProcessGroups
    device: torch.device
    batches: Batches

    def loader(self, start_step: int) -> Loader:
        """This rank's shares from step `start_step` + 1 to the last; it reads ahead at once."""
        place = self.groups.coordinate
        return Loader(
            self.batches,
            self.engine.plan.share,
            part=place.dp_shard,
            parts=self.groups.degree("dp_shard"),
            first_step=start_step + 1,
            last_step=self.config.train.steps,
            device=self.device,
        )

    def close(self) -> None:
        """Leave the generation in an orderly way."""
        self.engine.close()


def build_session(
    config: RunConfig,
    batches: Batches,
    topology: Topology,
    rank: int,
    store: Store,
    device: torch.device,
    *,
    dealer: Dealer = deal,
    seconds: float = 1800.0,
) -> TrainingSession:
    """Connect to the generation's groups and build model, optimizer and reducer.

    Collective over the topology. The state is memory without values until it is initialised or
    loaded. `config.model.vocab_size` must be resolved. Raises LayoutError for a topology that
    cannot be run, and PeerLostError when a peer does not come.
    """
    groups = connect_groups(config, topology, rank, store, device, seconds)
    engine = build_engine(config, groups, device, dealer=dealer)
    return make_session(config, engine, batches, device)


def connect_groups(
    config: RunConfig,
    topology: Topology,
    rank: int,
    store: Store,
    device: torch.device,
    seconds: float,
) -> ProcessGroups:
    """The generation's groups, as the run file wants them: with what notes when things happen,
    where it names a step to be traced. Raises as `connect`."""
    return connect(
        topology,
        rank,
        store,
        device,
        interface=config.cluster.gloo_device,
        seconds=seconds,
        recorder=SpanRecorder() if config.layout.trace_step else None,
    )


def make_session(
    config: RunConfig, engine: StepEngine, batches: Batches, device: torch.device
) -> TrainingSession:
    """An engine with its data and its evaluation."""
    groups, validation = engine.groups, batches.validation(config.train.evaluate.samples)
    evaluator = Evaluator(engine.objective, engine.executor, groups, validation, device)
    return TrainingSession(config, engine, evaluator, groups, device, batches)


def build_engine(
    config: RunConfig, groups: ProcessGroups, device: torch.device, *, dealer: Dealer = deal
) -> StepEngine:
    """Model, optimizer and reducer for one rank, without data.

    The model is built in full on the meta device. It is cut down to this rank's stage and to its
    part of each tensor, and only then given memory.
    """
    if config.model.vocab_size < 1:
        raise ConfigError(
            "the vocabulary size is not known yet",
            where="model.vocab_size",
            remedy="prepare the dataset, or set it",
        )
    precision = Precision.of(config.train.precision)
    objective = _cut_model(config, groups)
    objective.to(precision.state)
    if config.train.compile:
        for block in objective.decoder.layers:
            block.compile()
        if objective.tensor is not None:
            objective.tensor.exclude_from_compilation()
    shards = groups.degree("dp_shard")
    make = _replicated if shards == 1 else _zero1 if config.layout.zero == 1 else _sharded
    parameters, feed = make(config, objective, groups, device, precision)
    runs = make_executor(
        objective,
        groups,
        config.layout.schedule,
        config.model.dim,
        precision.compute,
        device,
        sequence_parallel=config.layout.sequence_parallel,
    )
    return StepEngine(objective, runs, parameters, feed, groups, config.train, device, dealer)


def _cut_model(config: RunConfig, groups: ProcessGroups) -> NextTokenObjective:
    """On the meta device: the blocks of this rank's stage, each tensor cut by tp."""
    replica, place = groups.replica, groups.coordinate
    with torch.device("meta"):
        objective = NextTokenObjective(Decoder(config.model), config.train.compile)
    decoder = objective.decoder
    blocks = replica.blocks(place.pp)
    if blocks is not None:
        keep_stage(decoder, blocks, groups.is_first_stage, groups.is_last_stage)
    if groups.degree("tp") > 1:
        names = [name for name, _ in decoder.named_parameters()]
        localise_parameters(decoder, _boxes(config, groups, names, sharded=False))
        apply_tensor_parallel(
            objective,
            groups.axis("tp"),
            sequence_parallel=config.layout.sequence_parallel,
            traffic=groups.traffic,
        )
    return objective


BuiltParameters = tuple[Parameters, GradientFeed]


def _replicated(
    config: RunConfig,
    objective: NextTokenObjective,
    groups: ProcessGroups,
    device: torch.device,
    precision: Precision,
) -> BuiltParameters:
    """This stage's part of the model on this device. In mixed precision the module computes on
    bf16 copies."""
    give_memory(objective.to(precision.compute), device)
    table, boxes, named = _rows_on_rank(config, objective, groups)
    held = [p.detach() for p in named.values()]
    computed: list[torch.Tensor] = []
    if precision.mixed:
        computed = held
        held = [torch.empty_like(p, dtype=precision.state) for p in computed]

    def feeder(cells: Cells, by_unit: bool) -> GradientFeeder:
        return ReplicatedGradients(
            named,
            boxes,
            cells,
            dtype=precision.state,
            fast=config.layout.reduction == "fast",
            bucket_bytes=int(config.layout.bucket_mb * 1e6),
            by_unit=by_unit,
        )

    feed = _gradient_feed(config, feeder, lambda groups: _any_fsdp(config, groups))
    return Parameters(table, tuple(boxes.values()), held, computed), feed


def _zero1(
    config: RunConfig,
    objective: NextTokenObjective,
    groups: ProcessGroups,
    device: torch.device,
    precision: Precision,
) -> BuiltParameters:
    """As `_replicated`, but what is trained and saved is this rank's part of the rows (ZeRO-1)."""
    give_memory(objective.to(precision.compute), device)
    table, boxes, named = _rows_on_rank(config, objective, groups)
    whole = _boxes(config, groups, list(named), sharded=False)
    rows = OwnedRows(
        named,
        whole,
        boxes,
        groups.axis("dp_shard"),
        state=precision.state,
        traffic=groups.traffic,
    )

    def feeder(cells: Cells, by_unit: bool) -> GradientFeeder:
        return ReplicatedGradients(
            named,
            whole,
            cells,
            dtype=precision.state,
            wanted=boxes,
            by_unit=by_unit,
            fast=config.layout.reduction == "fast",
            bucket_bytes=int(config.layout.bucket_mb * 1e6),
        )

    feed = _gradient_feed(config, feeder, lambda groups: False)
    return Parameters(table, tuple(boxes.values()), rows.master_tensors, [], rows.gather), feed


def _sharded(
    config: RunConfig,
    objective: NextTokenObjective,
    groups: ProcessGroups,
    device: torch.device,
    precision: Precision,
) -> BuiltParameters:
    """A shard of that by FSDP2 (ZeRO-2 or 3), which makes the bf16 copies itself."""
    # Imported only if needed: FSDP2 brings DTensor and sympy, a second of a process's start.
    # (`elastic.protocol.worker_spec.modules_to_preload` has the fork server import it where the run
    # file shards).
    from holdfast.parallel.fsdp import ShardedGradients, apply_fsdp

    compute = precision.compute if precision.mixed else None
    blocks = list(objective.decoder.layers)
    apply_fsdp(objective, blocks, groups.shard_mesh(), compute, config.layout.zero)
    give_shards_memory(objective, device)
    table, boxes, named = _rows_on_rank(config, objective, groups)
    traffic = groups.traffic

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
        )

    held = [local_tensor(p) for p in named.values()]
    feed = _gradient_feed(config, feeder, lambda groups: True)
    return Parameters(table, tuple(boxes.values()), held, []), feed


def _gradient_feed(
    config: RunConfig,
    make: Callable[[Cells, bool], GradientFeeder],
    by_unit: Callable[[ProcessGroups], bool],
) -> GradientFeed:
    """See `engine.GradientFeed`. by_unit: whether buckets are blocks in a generation."""

    def feed(groups: ProcessGroups, old: GradientReducer | None) -> GradientReducer:
        cells, units = _cells_and_teams(config, groups), by_unit(groups)
        if isinstance(old, GradientFeeder) and old.regroup(cells, units):
            return old
        return make(cells, units)

    return feed


def _any_fsdp(config: RunConfig, groups: ProcessGroups) -> bool:
    """Whether some replica's gradients come by FSDP2's units: then all reduce by unit."""
    shards = max(replica.degree("dp_shard") for replica in groups.topology.replicas)
    return shards > 1 and config.layout.zero > 1


def _boxes(
    config: RunConfig, groups: ProcessGroups, names: Sequence[str], *, sharded: bool
) -> dict[str, Box]:
    """What this rank has of some parameters, by dp_shard's cut too or only by those before it."""
    rows = {row.name: row for row in parameter_table(config.model, config.train.precision)}
    if not sharded:
        rows = {name: replace(row, shard_dim=None) for name, row in rows.items()}
    return {name: mesh_box(rows[name], groups.replica, groups.coordinate) for name in names}


def _cells_and_teams(config: RunConfig, groups: ProcessGroups) -> list[tuple[Cell, CellTeam]]:
    """This rank's reduction cells and whom it meets in each."""
    cells = reduction_cells(
        groups.topology,
        config.model,
        groups.rank,
        sequence_parallel=config.layout.sequence_parallel,
        zero=config.layout.zero,
    )
    return list(zip(cells, groups.teams(cells), strict=True))


Table = tuple[tuple[Parameter, ...], dict[str, Box], dict[str, nn.Parameter]]


def _rows_on_rank(config: RunConfig, objective: NextTokenObjective, groups: ProcessGroups) -> Table:
    """The rows, boxes and parameters that this rank has, in the order of the parameter table."""
    named = {name.removeprefix("decoder."): p for name, p in objective.named_parameters()}
    table = tuple(row for row in decoder_parameters(config.model) if row.name in named)
    if [row.name for row in table] != list(named):
        raise RuntimeError(f"the model has {list(named)}, its table {[r.name for r in table]}")
    return table, _boxes(config, groups, list(named), sharded=True), named
