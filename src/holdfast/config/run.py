"""The run file: everything that decides what a run computes, in one frozen value.

Each section belongs to the thing it configures; rules that cross sections stand here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from holdfast.config.huggingface.convert import explain_no_architecture
from holdfast.config.sections.base import Branch, InPlace, Never, Section
from holdfast.config.sections.budget import BudgetConfig
from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.config.sections.cluster import ClusterConfig
from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.degrees import (
    ModuleCuts,
    find_impossible_degrees,
    find_impossible_float8,
)
from holdfast.config.sections.evaluate import EvaluateTasksConfig
from holdfast.config.sections.governance import GovernanceConfig
from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.sections.layout import LayoutConfig
from holdfast.config.sections.logging import LoggingConfig
from holdfast.config.sections.lora import NF4, NF4_BLOCK, LoraConfig
from holdfast.config.sections.memory import DEVICE, MOVABLE
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.objective import ObjectiveConfig
from holdfast.config.sections.observe import ObserveConfig
from holdfast.config.sections.optimizer import BUILT_IN, OptimizerConfig
from holdfast.config.sections.outer import OuterConfig
from holdfast.config.sections.pause import PauseConfig
from holdfast.config.sections.plan import PlanConfig
from holdfast.config.sections.recompute import RecomputePolicy
from holdfast.config.sections.rollout import RolloutConfig
from holdfast.config.sections.run_place import is_bucket, local_run_folder
from holdfast.config.sections.server import ParameterServerConfig
from holdfast.config.sections.task import SCRIPT_TASK, TaskConfig
from holdfast.config.sections.train import ScheduleConfig, TrainConfig
from holdfast.options.registry import used_option_keys


class RunConfig(Section):
    name: InPlace[str] = Field("run", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """name in logs, metrics and pages"""
    folder: InPlace[str] = "runs/{name}"
    """the run folder, or the address of a bucket (s3://, gs://, az://); {name} is filled in"""
    branch_of: Never[str] = Field("", pattern=r"^([^@]+@[0-9]+)?$")
    """the run and the step that this run continues, as `holdfast branch` writes them; empty: it
    begins at step 0"""
    tags: InPlace[dict[str, str]] = Field(default_factory=dict)
    """words of your own, as team: search; `holdfast runs` finds runs by them
    ([cost.md](../guide/cost.md))"""
    seed: Never[int] = Field(1, ge=0, lt=2**63)
    """seed of the initial weights and of the order of samples"""
    device: InPlace[Literal["auto", "cpu", "cuda", "xpu", "mps"]] = "auto"
    """auto: the machine's accelerator if it has one, cpu otherwise (planned). cuda is NVIDIA and
    AMD, xpu Intel, mps Apple"""
    tensorboard: InPlace[bool] = False
    """short for logging.trackers: [tensorboard]"""
    task: Never[TaskConfig] = TaskConfig.model_validate({})
    data: Never[DataConfig] = DataConfig()
    model: Never[ModelConfig] = Field(default_factory=lambda: ModelConfig.model_validate({}))
    lora: Never[LoraConfig] = LoraConfig()
    rollout: Branch[RolloutConfig] = RolloutConfig()
    objective: Branch[ObjectiveConfig] = ObjectiveConfig()
    train: TrainConfig = TrainConfig()
    outer: Never[OuterConfig] = OuterConfig()
    server: Never[ParameterServerConfig] = ParameterServerConfig()
    layout: InPlace[LayoutConfig] = LayoutConfig()
    plan: InPlace[PlanConfig] = PlanConfig()
    checkpoint: InPlace[CheckpointConfig] = CheckpointConfig()
    cluster: InPlace[ClusterConfig] = ClusterConfig()
    launch: InPlace[LaunchConfig] = LaunchConfig()
    logging: InPlace[LoggingConfig] = LoggingConfig()
    observe: InPlace[ObserveConfig] = ObserveConfig()
    evaluate: InPlace[EvaluateTasksConfig] = EvaluateTasksConfig()
    governance: InPlace[GovernanceConfig] = GovernanceConfig()
    budget: InPlace[BudgetConfig] = BudgetConfig()
    pause: InPlace[PauseConfig] = PauseConfig()

    @field_validator("device", mode="before")
    @classmethod
    def _is_supported(cls, device: object) -> object:
        if device in ("tpu", "xla"):
            raise ValueError(f"{device} is refused, as Holdfast does not train on TPUs: use cpu")
        if device == "gpu":
            raise ValueError("gpu is no kind of device: use auto")
        return device

    @field_validator("folder")
    @classmethod
    def _is_a_folder(cls, folder: str) -> str:
        if "://" in folder and not is_bucket(folder):
            raise ValueError(
                f"{folder.partition('://')[0]}:// is no kind of run store: use runs/{{name}}, or "
                "an address that begins with s3://, gs:// or az://"
            )
        return folder

    def broken_rules(self) -> Iterator[str]:
        """Those that cross sections."""
        length, cuts = self.data.sequence_length, self.module_cuts
        yield find_impossible_degrees(self.layout, self.model, self.train, length, cuts) or ""
        trained = "" if cuts is None else cuts.trained
        yield find_impossible_float8(self.layout, self.model, self.train, length, trained) or ""
        if self.task.name and not self.train.microbatch_size:
            yield (
                "train.microbatch_size auto needs formulas of the memory, which know no task: use "
                "a number"
            )
        yield from self._broken_rules_of_evaluation()
        experts = self.model.experts
        if experts is not None and self.lora.rank:
            yield (
                f"lora.rank {self.lora.rank} makes adapters, and model.experts has none of them: "
                "use lora.rank 0, or a model without experts"
            )
        if self.lora.rank and self.lora.dropout and any(d.cp > 1 for _, d in self.layout.kinds):
            yield (
                f"lora.dropout {self.lora.dropout} draws for complete samples, and cp cuts them: "
                "use lora.dropout 0, or cp 1"
            )
        yield from self._broken_base_rules()
        if experts is not None and self.train.precision == "fp16" and experts.has_loss:
            yield (
                "train.precision fp16 scales the loss, but not those of model.experts: use bf16, "
                "or balance_loss 0 and z_loss 0"
            )
        yield from self._broken_rules_of_rollout()
        yield from self._broken_rules_of_outer()
        yield from self._broken_rules_of_server()
        yield explain_no_architecture(self.model) or ""
        if self.checkpoint.seal and is_bucket(self.folder):
            yield (
                "checkpoint.seal encrypts the checkpoints in a run folder, and folder is a bucket: "
                f"use the option seal={self.checkpoint.seal} of its address"
            )
        if self.cluster.loss_jumps == "roll_back" and self.cluster.replaces_all_workers:
            yield (
                "cluster.loss_jumps: roll_back does a step again in the same processes: "
                "use cluster.recovery: live, or loss_jumps: ignore"
            )
        yield from self._broken_objective_rules()
        if self.train.memory.parameters != DEVICE and not self.layout.cuts_parameters:
            yield (
                f"train.memory.parameters {self.train.memory.parameters} moves shards, and only "
                "layout.zero 2 or 3 with dp_shard above 1 makes them (not zero2_reduce step): "
                "use train.memory.parameters: device"
            )
        if self.data.sequence_length > self.model.max_position:
            yield (
                f"data.sequence_length {self.data.sequence_length} is longer than "
                f"model.max_position {self.model.max_position}: "
                f"use {self.model.max_position} or less"
            )

    def _broken_rules_of_evaluation(self) -> Iterator[str]:
        """Those of the sources whose validation text is measured."""
        measured = self.train.evaluate.sources
        if measured and self.has_own_data:
            yield "train.evaluate.sources names data.sources, and this run has none: remove it"
            return
        names = [source.mix_name for source in self.data.sources]
        if unknown := [name for name in measured if name not in names]:
            yield f"train.evaluate.sources has {unknown[0]}, no source: use {', '.join(names)}"

    def _broken_rules_of_rollout(self) -> Iterator[str]:
        """Those of a run that generates its data."""
        rollout, makes_rows = self.rollout, self.objective.facts.makes_rows
        if not rollout.is_on:
            if makes_rows:
                yield (
                    f"objective.kind {self.objective.kind} learns from completions of prompts: use "
                    "rollout.prompts and rollout.rewards"
                )
            return
        if self.task.name:
            yield (
                f"rollout.prompts generates with the built-in decoder, and this run trains "
                f"{self.task.label}: remove rollout.prompts, or task"
            )
        sizes = (self.train.batch_size, *(stage.batch_size for stage in self.train.batch_warmup))
        if odd := [size for size in sizes if size % rollout.samples]:
            yield (
                f"train.batch_size {odd[0]} counts completions, and rollout.samples "
                f"{rollout.samples} does not divide it: use "
                f"{max(1, odd[0] // rollout.samples) * rollout.samples}"
            )
        if rollout.server.url and not self.lora.rank:
            yield (
                "rollout.server.url generates with adapters, which a server can load while it "
                "runs: use lora.rank 16 or another, or no server"
            )
        if self.objective.kind in ("grpo", "rloo") and rollout.samples < 2:
            yield (
                f"rollout.samples {rollout.samples} leaves objective.kind {self.objective.kind} "
                "nothing to compare a completion with: use 2 or more"
            )
        if self.model.logit_softcap and rollout.temperature not in (0, 1):
            yield (
                f"rollout.temperature {rollout.temperature} divides logits that "
                "model.logit_softcap has limited, which a trainer cannot do: use "
                "rollout.temperature 1"
            )
        if rollout.max_tokens >= self.data.sequence_length:
            yield (
                f"rollout.max_tokens {rollout.max_tokens} leaves no room for a prompt in "
                f"data.sequence_length {self.data.sequence_length}: use fewer"
            )
        if self.objective.kind == "distill":
            yield from self._broken_rules_of_own_completions()
        elif not makes_rows:
            yield (
                f"rollout.prompts generates what a policy gradient or a distillation learns from, "
                f"and objective.kind is {self.objective.kind}: use objective.kind: grpo, rloo, ppo "
                "or distill"
            )
        elif not rollout.rewards:
            yield "rollout.prompts without rollout.rewards gives nothing to learn: use at least one"
        elif rollout.server.url and self.objective.kind == "rloo" and self.objective.beta:
            yield (
                f"objective.beta {self.objective.beta} changes the rewards of rloo, for which "
                "actors read each completion, and rollout.server reads none: use beta 0, or "
                "objective.kind: grpo"
            )
        elif rollout.server.url and self.objective.whiten_advantages:
            yield (
                "objective.whiten_advantages needs the values of each completion, and "
                "rollout.server has none: use whiten_advantages: false"
            )
        if any(degrees.cp > 1 for _, degrees in self.layout.kinds):
            yield "rollout.prompts makes rows that cp cannot cut: use layout.cp 1"
        if self.layout.is_asynchronous:
            yield (
                f"layout.schedule {self.layout.schedule} trains with weights of several steps, "
                "and rollout needs those of one: use 1f1b or gpipe"
            )

    def _broken_rules_of_own_completions(self) -> Iterator[str]:
        """Those of a student whose teacher reads its completions."""
        if self.objective.alpha:
            yield (
                f"objective.alpha {self.objective.alpha} would teach the student its own "
                "completions, whose cross entropy says nothing about the teacher: use "
                "objective.alpha 0, or remove it"
            )
        if self.rollout.filter != "none":
            yield (
                f"rollout.filter {self.rollout.filter} drops groups by their rewards, and "
                "objective.kind distill learns from a teacher: use rollout.filter none"
            )
        if self.data.attention != "document":
            yield (
                "rollout.prompts makes rows with room after their end, which must not see each "
                "other: use data.attention: document"
            )

    def _broken_rules_of_outer(self) -> Iterator[str]:
        """Those of a run whose learners train apart."""
        outer, train = self.outer, self.train
        if not outer.is_on:
            return
        key = f"outer.learners {outer.learners}"
        if outer.trust.checks and self.layout.workers == 1:
            yield (
                "outer.trust.checks needs another worker, and layout.workers is 1: use "
                "layout.workers 2, or checks 0"
            )
        if train.batch_size % outer.learners:
            best = max(1, round(train.batch_size / outer.learners)) * outer.learners
            yield (
                f"{key} do not divide train.batch_size {train.batch_size}, the samples of an inner "
                f"step over all learners: use train.batch_size {best}"
            )
        if outer.fragments > self.model.layers:
            yield (
                f"outer.fragments {outer.fragments} are more than the {self.model.layers} blocks "
                f"of the model: use outer.fragments {self.model.layers}"
            )
        sites, workers = self.cluster.sites, self.layout.workers
        placed = sum(site.workers for site in sites)
        if workers and placed and all(site.workers for site in sites) and placed != workers:
            yield (
                f"cluster.sites have {placed} workers, and layout.workers is {workers}: use "
                f"layout.workers {placed}"
            )
        share = train.batch_size // outer.learners
        if train.microbatch_size and share % train.microbatch_size:
            yield (
                f"train.microbatch_size {train.microbatch_size} does not divide the {share} "
                f"samples of a learner's inner step: use train.microbatch_size {share}"
            )
        yield from self._refuse_unbuilt(key, "outer.learners 0")

    def _broken_rules_of_server(self) -> Iterator[str]:
        """Those of a run whose weights are updated by servers."""
        server, train = self.server, self.train
        if not server.is_on:
            return
        key = f"server.mode {server.mode}"
        if self.outer.is_on:
            yield (
                f"{key} updates the weights of a run, and outer.learners {self.outer.learners} "
                "train apart: use server.mode none, or outer.learners 0"
            )
        size = train.microbatch_size
        for name in ("update_microbatches", "max_update_microbatches"):
            samples = size * getattr(server, name)
            if samples and train.batch_size % samples and server.mode != "bounded_stale":
                best = max(1, round(train.batch_size / samples)) * samples
                yield (
                    f"server.{name} {getattr(server, name)} of train.microbatch_size {size} do "
                    f"not divide train.batch_size {train.batch_size}, the samples of a step: use "
                    f"train.batch_size {best}"
                )
        yield from self._refuse_unbuilt(key, "server.mode none")

    def _refuse_unbuilt(self, key: str, remedy_of_key: str) -> Iterator[str]:
        """Yield what learners and servers have not been built for."""
        layout, train = self.layout, self.train
        for where, degrees in layout.kinds:
            for axis in ("pp", "dp_shard", "cp", "tp"):
                if (degree := getattr(degrees, axis)) > 1:
                    yield (
                        f"{key} needs all of a model on a worker, and {where}.{axis} {degree} "
                        f"cuts the model: use {where}.{axis} 1"
                    )
        experts, memory = self.model.experts, train.memory
        moved = next((k for k in MOVABLE if getattr(memory, k) != DEVICE), "")
        for is_other, what, remedy in (
            (self.task.name, f"task {self.task.name}", "remove task"),
            (self.rollout.is_on, "rollout.prompts", "remove it"),
            (
                not self.objective.is_next_token,
                f"objective.kind {self.objective.kind}",
                "use next_token",
            ),
            (self.data.chat.weights, "data.chat.weights true", "use false"),
            (self.lora.dropout, f"lora.dropout {self.lora.dropout}", "use lora.dropout 0"),
            (experts is not None, "model.experts", "use a model without experts"),
            (train.batch_warmup, "train.batch_warmup", "remove it"),
            (train.epochs, f"train.epochs {train.epochs}", "use train.steps"),
            (train.precision == "fp16", "train.precision fp16", "use bf16 or fp32"),
            (moved, f"train.memory.{moved}", "use device"),
            (memory.activations != DEVICE, "train.memory.activations", "use device"),
            (
                train.optimizer.name not in BUILT_IN,
                f"train.optimizer.name {train.optimizer.name}",
                f"use one of {', '.join(BUILT_IN)}",
            ),
            *((True, each, "remove it") for each in used_option_keys(self)),
            (layout.reduction == "fast", "layout.reduction fast", "use tree"),
            (self.cluster.loss_jumps == "roll_back", "cluster.loss_jumps roll_back", "use another"),
        ):
            if is_other:
                yield f"{key} has not been built for {what}: {remedy}, or {remedy_of_key}"

    @property
    def computes_apart(self) -> bool:
        """Whether a step has updates of its own on weights that are not the run's."""
        return self.outer.is_on or self.server.is_on

    @property
    def apart_key(self) -> str:
        """The key that lets a step have updates of its own, with its value; "" if none does."""
        if self.server.is_on:
            return f"server.mode {self.server.mode}"
        return f"outer.learners {self.outer.learners}" if self.outer.is_on else ""

    @property
    def step_train(self) -> TrainConfig:
        """`train` of a step as data, summation and update see it. With learners, a step is a round,
        a microbatch is all that a learner computes in it, and the update is the outer one."""
        outer, train = self.outer, self.train
        if not outer.is_on:
            return train
        samples, update = train.batch_size * outer.inner_steps, outer.optimizer
        applied = OptimizerConfig(
            name="sgd",
            learning_rate=update.learning_rate,
            momentum=update.momentum_value,
            nesterov=update.name == "nesterov",
            weight_decay=0.0,
            clip_norm=0.0,
        )
        changes = {
            "batch_size": samples,
            "microbatch_size": samples // outer.learners,
            "optimizer": applied,
            "schedule": ScheduleConfig(kind="constant", warmup_steps=0),
        }
        return train.model_copy(update=changes)

    @property
    def inner_train(self) -> TrainConfig:
        """`train` as the rate sees it. With learners, its schedule counts inner steps, so that the
        rate follows the samples and not the rounds."""
        train, every = self.train, self.outer.inner_steps
        if not self.outer.is_on:
            return train
        keys = ("steps", "warmup_steps", "decay_steps")
        counts = {key: getattr(train.schedule, key) * every for key in keys}
        schedule = train.schedule.model_copy(update=counts)
        return train.model_copy(update={"steps": train.steps * every, "schedule": schedule})

    @property
    def has_read_reference(self) -> bool:
        """Whether actors read completions with the reference. With adapters, trainers do so, but
        for rloo, whose rewards have the KL. A teacher is the trainers'."""
        reads = self.rollout.is_on and self.objective.reads_reference
        reads = reads and self.objective.facts.makes_rows
        return reads and (not self.lora.rank or self.objective.kind == "rloo")

    @property
    def has_own_data(self) -> bool:
        """Whether the data is not a prepared dataset: a task's own, or completions of prompts."""
        return self.task.has_own_data or self.rollout.is_on

    def _broken_base_rules(self) -> Iterator[str]:
        """Those of a frozen base in 4 bits."""
        lora, model = self.lora, self.model
        if lora.base_dtype != NF4:
            return
        if not lora.rank or self.task.name:
            what = "adapters of the built-in decoder" if self.task.name else "adapters"
            yield f"lora.base_dtype {NF4} is for {what}: use lora.base_dtype: compute"
        for key, degrees in self.layout.kinds:
            for name, width, tp in (
                ("model.dim", model.dim, 1),
                ("model.heads x head_dim", model.heads * model.head_size, degrees.tp),
                ("model.ffn_dim", model.ffn_dim, degrees.tp),
            ):
                if width % (tp * NF4_BLOCK):
                    part = f" / {key}.tp {tp}" if tp > 1 else ""
                    yield (
                        f"lora.base_dtype {NF4} needs rows of multiples of {NF4_BLOCK}, and {name} "
                        f"{width}{part} is none: use lora.base_dtype: compute"
                    )

    def _broken_objective_rules(self) -> Iterator[str]:
        """Those of a run with another objective than the next token."""
        kind, needed = self.objective.kind, self.objective.score_head
        if self.has_decoder and self.model.score_head != needed:
            yield (
                f"model.score_head {self.model.score_head} does not fit objective.kind {kind}: "
                f"use model.score_head: {needed}"
            )
        if self.objective.is_next_token:
            return
        if self.task.name:
            yield (
                f"objective.kind {kind} trains the built-in decoder, and {self.task.label} has a "
                "loss of its own: use objective.kind: next_token, or no task"
            )
        if any(degrees.cp > 1 for _, degrees in self.layout.kinds):
            yield (
                f"objective.kind {kind} needs complete rows, and layout.cp cuts them: use "
                "layout.cp 1, and tp or pp"
            )
        if self.layout.is_asynchronous:
            yield (
                f"objective.kind {kind} does not work with layout.schedule "
                f"{self.layout.schedule}, whose passes overlap steps: use layout.schedule 1f1b"
            )
        facts, kinds = self.objective.facts, self.layout.kinds
        if facts.needs_all_logits and any(degrees.tp > 1 for _, degrees in kinds):
            yield (
                f"objective.kind {kind} needs all logits of a token, and layout.tp cuts them: use "
                "layout.tp 1"
            )
        if facts.has_rows and self.data.attention != "document":
            yield (
                f"objective.kind {kind} has several rows in a sample, which must not see each "
                "other: use data.attention: document"
            )
        if self.lora.adapter and self.objective.facts.needs_reference:
            yield (
                f"lora.from begins with adapters, and the reference of objective.kind {kind} is "
                "the base without them: use model.from with a folder into which they are merged"
            )
        if kind == "distill" and self.lora.rank:
            yield "objective.kind distill has not been tried with adapters: use lora.rank 0"
        if self.objective.reference.model and self.lora.rank:
            yield (
                "with adapters the base is the reference, and objective.reference.model names "
                "another: use lora.rank 0, or remove objective.reference.model"
            )
        if self.data.chat.weights:
            yield (
                f"objective.kind {kind} gives each target a weight of its own: use "
                "data.chat.weights: false"
            )
        experts = self.model.experts
        if experts is not None and experts.has_loss:
            yield (
                f"objective.kind {kind} divides by {self.objective.facts.unit}, and the losses of "
                "model.experts are of tokens: use balance_loss 0 and z_loss 0"
            )

    @property
    def has_decoder(self) -> bool:
        """Whether the built-in decoder is trained, or adapters of it."""
        return not self.task.name

    @property
    def trains_decoder(self) -> bool:
        """Whether all of the built-in decoder is trained."""
        return self.has_decoder and not self.lora.rank

    def recompute_policy(self, stage: int, stages: int, tp: int) -> RecomputePolicy:
        """What the blocks of a stage keep, of a pipeline of so many and with that degree of tp."""
        word = self.train.recompute_of(stage, stages)
        is_cut = self.train.partition_activations and self.has_decoder and word != "none"
        is_cut = is_cut and not self.layout.sequence_parallel
        is_cut = is_cut and self.train.memory.activations == DEVICE  # otherwise all of it moves
        return RecomputePolicy(word, self.train.recompute_keep, tp if is_cut else 1)

    @property
    def module_cuts(self) -> ModuleCuts | None:
        """How what is trained may be cut, if it is not the decoder itself, which has a table of
        its own."""
        if self.trains_decoder:
            return None
        if self.lora.rank:
            of_decoder = self.has_decoder
            return ModuleCuts("lora", {}, True, can_have_table=False, of_decoder=of_decoder)
        task = self.task
        rows = (row.split(" ") for row in task.sharding)
        parts = {
            row[0]: int(row[2]) for row in rows if len(row) == 3
        }  # a row of two words has none
        is_script = task.name == SCRIPT_TASK
        return ModuleCuts(
            task.label, parts, bool(task.parameters), not is_script, blocks=task.blocks
        )

    @property
    def run_folder(self) -> str:
        """The run's folder on this node: `folder`, or the local one of a run in a bucket."""
        place = self.run_place
        return local_run_folder(place) if is_bucket(place) else place

    @property
    def run_place(self) -> str:
        """The place of the run store: a folder, or the address of a bucket."""
        return self.folder.replace("{name}", self.name)
