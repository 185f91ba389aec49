"""From a run file and a place in a topology to everything that the training loop needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from holdfast.config.run import RunConfig
from holdfast.data.batch import Batches
from holdfast.data.loader import Loader
from holdfast.errors import ConfigError
from holdfast.layout import Topology
from holdfast.model.decoder import Decoder
from holdfast.parallel.groups import Groups, connect
from holdfast.parallel.replicate import ReplicatedGradients
from holdfast.parallel.shard import ShardedGradients, apply_fsdp, local
from holdfast.parallel.torch_compat import Store
from holdfast.spec.parameters import decoder_parameters
from holdfast.spec.tree import deal
from holdfast.train.engine import Dealer, StepEngine
from holdfast.train.evaluate import Evaluator
from holdfast.train.objective import NextToken
from holdfast.train.precision import Precision
from holdfast.train.state import Parameters


@dataclass
class Session:
    """One rank of one generation, ready for its state: call `engine.initialise(config.seed)` or
    `engine.load(read)`, then `loader(start_step)`, then `runner.run`."""

    config: RunConfig
    engine: StepEngine
    evaluator: Evaluator
    groups: Groups
    device: torch.device
    _batches: Batches

    def loader(self, start_step: int) -> Loader:
        """This rank's shares from step `start_step` + 1 to the last; it reads ahead at once."""
        place = self.groups.coordinate
        return Loader(
            self._batches, self.engine.share, part=place.dp_shard, parts=self.groups.replica_size,
            first_step=start_step + 1, last_step=self.config.train.steps, device=self.device,
        )  # fmt: skip

    def close(self) -> None:
        """Leave the generation in an orderly way."""
        self.engine.close()


def build(
    config: RunConfig, batches: Batches, topology: Topology, rank: int, store: Store,
    device: torch.device, *, dealer: Dealer = deal, seconds: float = 1800.0,
) -> Session:  # fmt: skip
    """Connect to the generation's groups and build model, optimizer and reducer.

    Collective over the topology. The state is memory without values until it is initialised or
    loaded. `config.model.vocab_size` must be resolved. Raises LayoutError for a topology that
    cannot be run, and PeerLostError when a peer does not come.
    """
    groups = connect(
        topology, rank, store, device, interface=config.cluster.gloo_interface, seconds=seconds
    )
    engine = build_engine(config, groups, device, dealer=dealer)
    validation = batches.validation(config.train.evaluate.samples)
    evaluator = Evaluator(engine.objective, groups, validation, device)
    return Session(config, engine, evaluator, groups, device, batches)


def build_engine(
    config: RunConfig, groups: Groups, device: torch.device, *, dealer: Dealer = deal
) -> StepEngine:
    """Model, optimizer and reducer for one rank, without data."""
    if config.model.vocab_size < 1:
        raise ConfigError("the vocabulary size is not known yet", where="model.vocab_size",
                          remedy="prepare the dataset, or set it")  # fmt: skip
    precision = Precision.of(config.train.precision)
    with torch.device("meta"):
        objective = NextToken(Decoder(config.model), config.train.compile)
    objective.to(precision.state)
    blocks: Sequence[nn.Module] = list(objective.decoder.layers)
    if config.train.compile:
        for block in blocks:
            block.compile()
    make = _replicated if groups.mesh is None else _sharded
    parameters, gradients = make(config, objective, blocks, groups, device, precision)
    return StepEngine(objective, parameters, gradients, groups, config.train, dealer)


Made = tuple[Parameters, ReplicatedGradients | ShardedGradients]
Maker = Callable[[RunConfig, NextToken, Sequence[nn.Module], Groups, torch.device, Precision], Made]


def _replicated(
    config: RunConfig, objective: NextToken, blocks: Sequence[nn.Module], groups: Groups,
    device: torch.device, precision: Precision,
) -> Made:  # fmt: skip
    """The whole model on this device. In mixed precision the module computes on bf16 copies."""
    objective.to(precision.compute).to_empty(device=device)
    named = _by_table(config, objective)
    held = [p.detach() for p in named]
    computed: list[torch.Tensor] = []
    if precision.mixed:
        computed = held
        held = [torch.empty_like(p, dtype=precision.state) for p in computed]
    gradients = ReplicatedGradients(
        named, groups.reduce, dtype=precision.state, fast=config.layout.reduction == "fast",
        bucket_bytes=int(config.layout.bucket_mb * 1e6),
    )  # fmt: skip
    return Parameters(decoder_parameters(config.model), held, computed), gradients


def _sharded(
    config: RunConfig, objective: NextToken, blocks: Sequence[nn.Module], groups: Groups,
    device: torch.device, precision: Precision,
) -> Made:  # fmt: skip
    """A shard of the model by FSDP2, which makes the bf16 copies itself."""
    assert groups.mesh is not None
    compute = precision.compute if precision.mixed else None
    apply_fsdp(objective, blocks, groups.mesh, compute, config.layout.zero)
    objective.to_empty(device=device)
    named = _by_table(config, objective)
    gradients = ShardedGradients(
        objective, blocks, groups.reduce, dtype=precision.state,
        fast=config.layout.reduction == "fast",
    )  # fmt: skip
    parameters = Parameters(
        decoder_parameters(config.model), [local(p) for p in named], [],
        groups.coordinate.dp_shard, groups.replica_size,
    )  # fmt: skip
    return parameters, gradients


def _by_table(config: RunConfig, objective: NextToken) -> list[nn.Parameter]:
    """The module's parameters, which must be those of the table, in its order."""
    named = {name.removeprefix("decoder."): p for name, p in objective.named_parameters()}
    table = [row.name for row in decoder_parameters(config.model)]
    if list(named) != table:
        raise RuntimeError(f"the model has {list(named)}, its table {table}")
    return list(named.values())
