"""What the engine asks of what is trained, and the built-in decoder's answers.

`tasks/task/own.py` answers for a user's `Task`. The parameters' names and shapes are not asked for
here: they are data (`core/sharding/run_table.py`), which agent and mover need too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from holdfast.config.loading.model_from import refuse_other_shape
from holdfast.config.run import RunConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.data.skips import Skips
from holdfast.core.data.target_weights import target_ids, target_weights
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.parameters import SCORE, Parameter
from holdfast.core.sharding.state_table import mesh_box, parameter_table
from holdfast.data.read.weight_files import refuse_other_weights
from holdfast.data.stream.batch import Batches, Microbatch, ValidationSet
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.data.stream.loader import Loader
from holdfast.errors import ConfigError
from holdfast.model.decoder import Decoder
from holdfast.model.documents import choose_document_attention
from holdfast.model.huggingface import FolderTensors, import_folder
from holdfast.model.init import initial_box
from holdfast.model.stage import keep_stage
from holdfast.options.registry import hooks
from holdfast.parallel.axes.context import ContextParallel
from holdfast.parallel.axes.expert_parallel import (
    ExpertExchange,
    apply_expert_parallel,
    routed_layers,
    share_counts,
)
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.parallel.axes.tensor_parallel import apply_tensor_parallel, localise_parameters
from holdfast.parallel.comm.collectives import Collectives
from holdfast.training.engine.evaluate import TokenValidation, Validation
from holdfast.training.engine.executors import (
    Executor,
    PipelinedExecutor,
    SingleStageExecutor,
    token_arguments,
)
from holdfast.training.engine.objective import NextTokenObjective
from holdfast.training.engine.precision import Precision
from holdfast.training.engine.protocols import ShareLoader
from holdfast.training.engine.state import InitialBox
from holdfast.training.objectives.preference import identity
from holdfast.training.objectives.protocol import Combine
from holdfast.training.objectives.registry import make_objective
from holdfast.training.objectives.weights import ADDED, make_weigher
from holdfast.training.optimizers.make_optimizer import UserParts


class TaskBatchSource(Protocol):
    """Every batch of a run, by step number; `data.batch.Batches` is one."""

    skips: Skips


class DecoderBatches(TaskBatchSource, Protocol):
    """What the built-in decoder trains on; `data.batch.Batches` is one. A run that generates its
    own data has another, whose `microbatch` waits for what it returns."""

    def microbatches(self, step: int) -> int:
        """Logical microbatches of a step."""
        ...

    def microbatch(self, step: int, index: int, part: int = 0, parts: int = 1) -> Microbatch:
        """Part `part` of `parts` of a microbatch; called on the loader's thread, in order."""
        ...

    def validation(self, samples: int) -> ValidationSet:
        """The same samples each time; empty if there are none."""
        ...


OpenBatches = Callable[[str], DecoderBatches]
"""Opens the batches of a run. The argument is the folder of the prepared dataset."""


class EngineTask(Protocol):
    """One rank's view of what is trained. user_parts: the run file's own optimizer and schedule."""

    user_parts: UserParts

    def objective(self, groups: ProcessGroups) -> nn.Module:
        """The module from a microbatch to a loss sum, on the meta device, cut for this rank."""
        ...

    def named_parameters(self, objective: nn.Module) -> Mapping[str, Tensor]:
        """The objective's parameters by their names in the table, in the module's order. Buffers
        that are merged count as such (`core.sharding.parameters.Parameter.merge`)."""
        ...

    def units(self, objective: nn.Module) -> Sequence[nn.Module]:
        """The blocks that are gathered and compiled one by one."""
        ...

    def fill_constants(self, objective: nn.Module, device: torch.device) -> None:
        """Give the module what is no parameter, after it was given memory."""
        ...

    def initial_values(self, seed: int) -> InitialBox:
        """What gives each box of a parameter its values before the first step."""
        ...

    def executor(
        self, objective: nn.Module, groups: ProcessGroups, dtype: torch.dtype, device: torch.device
    ) -> Executor:
        """What runs the objective's passes. dtype: in which it computes."""
        ...

    def open_batches(self, dataset: str) -> TaskBatchSource:
        """The run's data. dataset: the folder of the prepared dataset."""
        ...

    def loader(
        self, batches: TaskBatchSource, share: Callable[[int], Sequence[int]], **where: Any
    ) -> ShareLoader:
        """What reads a rank's shares ahead. where: as `Loader` takes them."""
        ...

    def validation(self, batches: TaskBatchSource, samples: int) -> Validation:
        """Validation data, of so many samples at most."""
        ...

    def read_step(self, dataset: str, step: int) -> list[dict[str, Tensor]]:
        """The microbatches of a step as named tensors. dataset: as for `open_batches`."""
        ...

    def check_first_loss(
        self, objective: nn.Module, batches: TaskBatchSource, groups: ProcessGroups
    ) -> None:
        """Before the first step of a run: raise TaskError for a loss that breaks a rule. Collective
        over a replica."""
        ...

    def finish(self, on_wait: Callable[[], None]) -> None:
        """The run is finished. on_wait: called now and then if this takes long."""
        ...


class DecoderTask:
    """The built-in decoder, trained to predict the next token of a token dataset, or for another
    objective. open_source: opens the batches; None: those of the token dataset."""

    objective_class: ClassVar = NextTokenObjective
    arguments = staticmethod(token_arguments)
    added_sides: frozenset[str] = ADDED

    def __init__(
        self,
        config: RunConfig,
        user_parts: UserParts | None = None,
        open_source: OpenBatches | None = None,
    ) -> None:
        self._config, self.user_parts = config, user_parts or UserParts()
        self._open_source = open_source

    def objective(self, groups: ProcessGroups) -> NextTokenObjective:
        """The blocks of this rank's stage, each tensor cut by tp. Raises ConfigError."""
        config = self._config
        if config.model.vocab_size < 1:
            raise ConfigError(
                "the vocabulary size is not known yet",
                where="model.vocab_size",
                remedy="prepare the dataset, or set it",
            )
        replica, place = groups.replica, groups.coordinate
        with torch.device("meta"):
            objective = self.objective_class(
                Decoder(config.model),
                config.train.compile,
                config.data.chat.weights,
                config.train.loss_chunk,
                make_objective(config.objective, _combiner(groups), config.rollout),
            )
        decoder = objective.decoder
        if config.rollout.is_on:  # at 0 a completion's log-probabilities are those at 1
            objective.temperature = config.rollout.temperature or 1.0
        blocks = replica.blocks(place.pp)
        if blocks is not None:
            keep_stage(decoder, blocks, groups.is_first_stage, groups.is_last_stage)
        if groups.degree("tp") > 1:
            regions = hooks("layout", config.layout, lambda effect: effect.region)
            localise_parameters(decoder, self.tensor_boxes(decoder, groups))
            apply_tensor_parallel(
                objective,
                groups.axis("tp"),
                sequence_parallel=config.layout.sequence_parallel,
                degrees=config.layout.component_degrees,
                make_region=next(iter(regions), None),
                traffic=groups.traffic,
            )
            for overlap in hooks("layout", config.layout, lambda effect: effect.halves):
                overlap(objective)
            if config.train.compile and objective.tensor is not None:
                objective.tensor.exclude_from_compilation()
        if groups.degree("cp") > 1:
            layout = config.layout
            objective.context = ContextParallel(
                groups.axis("cp"), layout.cp_method, layout.cp_ring, groups.traffic
            )
            if config.train.compile:
                objective.context.exclude_from_compilation()
        if config.model.experts is not None:
            self._spread_experts(decoder, groups)
        return objective

    def _spread_experts(self, decoder: Decoder, groups: ProcessGroups) -> None:
        """Let routers know the ranks that share a microbatch with this one, and cut experts."""
        experts = self._config.model.experts
        shared = [groups.axis(axis) for axis in ("dp_shard", "cp") if groups.degree(axis) > 1]
        counted = experts is not None and (experts.balance_loss or experts.capacity)
        if counted and shared:
            share_counts(decoder, shared, groups.traffic)
        if groups.expert_degree > 1:
            group, layout = groups.axis("ep"), self._config.layout
            kinds = hooks("layout", layout, lambda effect: effect.expert_exchange)
            kind = next(iter(kinds), ExpertExchange)
            apply_expert_parallel(decoder, group, partial(kind, group, groups.traffic))
        if self._config.train.compile:
            for layer in routed_layers(decoder):
                layer.exclude_from_compilation()

    def named_parameters(self, objective: nn.Module) -> Mapping[str, Tensor]:
        named = objective.named_parameters()
        return {name.removeprefix("decoder."): parameter for name, parameter in named}

    def units(self, objective: nn.Module) -> list[nn.Module]:
        return list(cast(NextTokenObjective, objective).decoder.layers)

    def fill_constants(self, objective: nn.Module, device: torch.device) -> None:
        """Decide how attention stays inside documents. Other constants the decoder has none."""
        config = self._config
        if config.data.attention != "document":
            return
        dtype = Precision.of(config.train.precision).compute
        how = choose_document_attention(config.model, dtype, device)
        if config.train.compile:
            how.exclude_from_compilation()
        cast(NextTokenObjective, objective).decoder.document_attention = how

    def initial_values(self, seed: int) -> InitialBox:
        """Those of the folder of `model.weights`, or new ones."""
        model = self._config.model
        if not model.weights:
            return lambda row, box: initial_box(row, seed, box.offsets, box.lengths)
        tensors = open_weights(model, Path(model.weights), model.weights_checksum, "model.weights")

        def value(row: Parameter, box: Box) -> Tensor:
            if row.name == SCORE and SCORE not in tensors:  # of a language model
                return initial_box(row, seed, box.offsets, box.lengths)
            return tensors.box(row.name, box.offsets, box.lengths)

        return value

    def executor(
        self, objective: nn.Module, groups: ProcessGroups, dtype: torch.dtype, device: torch.device
    ) -> Executor:
        config = self._config
        if groups.degree("pp") == 1:
            return SingleStageExecutor(objective, groups.recorder, self.arguments)
        stream = config.model.dim, dtype
        return PipelinedExecutor(objective, groups, config.layout, *stream, device, self.arguments)

    def open_batches(self, dataset: str) -> DecoderBatches:
        config = self._config
        if self._open_source is not None:
            return self._open_source(dataset)
        opened = open_dataset(dataset, config.data)
        key = config.objective.reference.key
        return Batches(opened, config.data, config.step_train, config.seed, reference=key)

    def loader(
        self, batches: TaskBatchSource, share: Callable[[int], Sequence[int]], **where: Any
    ) -> Loader:
        return Loader(cast(DecoderBatches, batches), share, weigh=self.weigher(), **where)

    def weigher(self) -> Callable[[Microbatch], float] | None:
        """What counts the weight of a microbatch; None: it says so itself."""
        objective = make_objective(self._config.objective)
        if objective is None:
            return None
        return make_weigher(self._config.objective, objective, self.added_sides)

    def validation(self, batches: TaskBatchSource, samples: int) -> TokenValidation:
        return TokenValidation(cast(DecoderBatches, batches).validation(samples), self.weigher())

    def read_step(self, dataset: str, step: int) -> list[dict[str, Tensor]]:
        batches = self.open_batches(dataset)
        read = [batches.microbatch(step, index) for index in range(batches.microbatches(step))]
        is_weighted = self._config.data.chat.weights
        return [_named_tensors(one, is_weighted) for one in read]

    def check_first_loss(
        self, objective: nn.Module, batches: TaskBatchSource, groups: ProcessGroups
    ) -> None:
        """The decoder's loss breaks none."""

    def finish(self, on_wait: Callable[[], None]) -> None:
        """Nothing is left to do."""

    def tensor_boxes(self, decoder: Decoder, groups: ProcessGroups) -> Mapping[str, Box]:
        """This rank's part of each of the decoder's own parameters, without dp_shard's cut."""
        config = self._config
        degrees = config.layout.component_degrees
        table = parameter_table(config.model, config.train.precision, degrees=degrees)
        rows = {row.name: replace(row, shard_dim=None) for row in table}
        names = [name for name, _ in decoder.named_parameters()]
        return {name: mesh_box(rows[name], groups.replica, groups.coordinate) for name in names}


def _combiner(groups: ProcessGroups) -> Combine:
    """What adds up over the ranks that share a microbatch's samples, in their order."""
    if groups.degree("dp_shard") == 1:
        return identity
    axis = Collectives(groups.axis("dp_shard"), groups.traffic)
    return lambda summed: axis.all_gather(summed[None]).sum(0)


def open_weights(model: ModelConfig, folder: Path, checksum: str, key: str) -> FolderTensors:
    """Return a folder's weights, by our names. key: of the run file, which names the folder. Raises
    ModelFolderError for another model, and for weights of another checksum."""
    refuse_other_weights(folder, checksum, key)
    found, tensors = import_folder(folder, model.vocab_multiple)
    refuse_other_shape(model, found, folder)
    return tensors


def _named_tensors(read: Microbatch, is_weighted: bool) -> dict[str, Tensor]:
    found: dict[str, Any] = {"inputs": read.inputs, "targets": target_ids(read.targets)}
    found |= read.side
    if is_weighted:
        found["weights"] = target_weights(read.targets)
    return {name: torch.from_numpy(rows) for name, rows in found.items()}
