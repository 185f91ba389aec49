"""The section `train:` of a run file: steps, batches, precision, optimizer and schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from holdfast.config.sections.base import Branch, InPlace, Section
from holdfast.config.sections.memory import DEVICE, MOVABLE, MemoryConfig
from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.config.sections.recompute import (
    DEFAULT_KEPT,
    KeptOperation,
    Recompute,
    check_words,
    word_of_stage,
)
from holdfast.errors import nearest_of
from holdfast.options.keep_zeros.keys import KeepZeros
from holdfast.options.qat.keys import Qat
from holdfast.options.registry import option_keys

MAX_MICROBATCHES = 2**20
"""Microbatches of a step, a plan of which has an entry for each; also samples of a microbatch."""

MAX_PROFILED_STEPS = 100
"""Steps of one profile: each takes memory of the worker until the last one has ended."""

SCHEDULES = ("constant", "linear", "cosine", "wsd")
SCHEDULES_WITHOUT_FINAL_RATIO = ("constant",)  # `final_ratio` has no effect on these
METRICS = (
    *("loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "entropy", "kl"),
    *("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
    *("completions/mean_length", "completions/clipped_ratio", "value_loss", "value_clip_ratio"),
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected", "nll_loss", "log_odds_ratio", "log_odds_chosen"),
    *("cross_entropy", "divergence"),
)
"""What steps report: loss, norm, and the sums of all objectives."""
FUNCTION_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class ScheduleConfig(Section):
    """Learning rate over steps; `wsd` is warm-up, stable, decay."""

    kind: str = "cosine"
    """the schedule after the warm-up: constant, linear, cosine, wsd; or a function
    `my_schedule:rate` of the step and the schedule's steps, which returns rate / peak rate"""
    steps: int = Field(0, ge=0)
    """steps of the schedule, after which the rate stays; 0: train.steps"""
    warmup_steps: int = Field(20, ge=0, description="steps in which the rate rises linearly")
    decay_steps: int = Field(0, ge=0)
    """wsd: steps of the decay; 0: a fifth of the schedule"""
    final_ratio: float = Field(0.1, ge=0, le=1, description="last rate / peak rate")
    counts_from: Branch[Literal[0, 1]] = 1
    """number of the first step for the schedule. 1: the first step of a warm-up has a rate above 0.
    0: as torch's schedulers count, so all rates come a step later"""
    args: Branch[dict[str, Any]] = Field(default_factory=dict)
    """a function: its other keyword arguments"""
    source: Branch[str] = Field("", description="digest of a function's source files (planned)")

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        if kind in SCHEDULES or FUNCTION_PATH.fullmatch(kind):
            return kind
        raise ValueError(
            f"{kind!r} is none of {', '.join(SCHEDULES)}, nor module:function: use "
            f"{nearest_of(kind, SCHEDULES) or SCHEDULES[0]}"
        )

    @model_validator(mode="after")
    def _has_args_of_its_own(self) -> ScheduleConfig:
        if self.args and not self.is_function:
            raise ValueError(f"schedule.args is for a function, and kind is {self.kind}: remove it")
        return self

    @property
    def is_function(self) -> bool:
        return self.kind not in SCHEDULES


class BatchStage(Section):
    """From step `from_step` on, a global batch of `batch_size` samples."""

    from_step: int = Field(ge=1, description="must rise from item to item")
    batch_size: int = Field(ge=1, description="a multiple of train.microbatch_size")


class EvaluateConfig(Section):
    every: int = Field(100, ge=0, description="steps between validations; 0: only at the end")
    samples: int = Field(64, ge=1, description="validation samples, the same each time")
    sources: tuple[str, ...] = ()
    """names of the sources whose validation text is measured; empty: all of them"""


class StopRuleConfig(Section):
    """Ends the run by the mean of a metric over its newest steps. The state is saved."""

    metric: str = "loss"
    """loss, grad_norm, or a metric of objective.kind, as reward, kl or entropy"""
    steps: int = Field(10, ge=1, description="length of the mean")
    below: float | None = Field(None, description="stop if the mean is lower")
    above: float | None = Field(None, description="stop if the mean is higher")
    falls: float | None = Field(None, gt=0)
    """stop if the mean is so much lower than the best one so far"""
    fails: bool | None = None
    """true: the exit code is 3, false: 0; none: true with falls, false otherwise"""

    @field_validator("metric")
    @classmethod
    def _is_reported(cls, metric: str) -> str:
        if metric in METRICS:
            return metric
        near = nearest_of(metric, METRICS)
        raise ValueError(
            f"no step reports {metric!r}: use {near or 'one of ' + ', '.join(METRICS)}"
        )

    @property
    def is_failure(self) -> bool:
        return self.falls is not None if self.fails is None else self.fails

    def broken_rules(self) -> Iterator[str]:
        limits = [key for key in ("below", "above", "falls") if getattr(self, key) is not None]
        if len(limits) != 1:
            said = " and ".join(limits) or "no limit"
            yield f"a rule has {said}: use one of below, above and falls"


class ProfileConfig(Section):
    """Steps of a run that torch's profiler records, as Chrome traces."""

    steps: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = None
    """the first and the last step; none: none. `holdfast profile RUN` asks a running job"""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """ranks that are profiled; each writes `profiles/<generation>/rank<r>-steps<a>-<b>.json`"""

    def broken_rules(self) -> Iterator[str]:
        if self.steps is not None and not self.ranks:
            yield "ranks [] name no rank to profile: use [0]"
        if self.steps is not None and not 0 <= self.steps[1] - self.steps[0] < MAX_PROFILED_STEPS:
            first = self.steps[0]
            yield (
                f"steps {list(self.steps)} are not 1 to {MAX_PROFILED_STEPS} steps in a row: use "
                f"[{first}, {first + 2}]"
            )


class TrainConfig(Section):
    steps: InPlace[int] = Field(1000, ge=1, description="steps of the run")
    epochs: InPlace[float] = Field(0.0, ge=0, le=10**6)
    """passes over the data, of which a start makes steps; 0: steps says how long the run is"""
    batch_size: Branch[int] = Field(16, ge=1, description="samples of one step, over all workers")
    microbatch_size: Branch[int] = Field(2, ge=0, le=MAX_MICROBATCHES)
    """samples of one logical microbatch; auto or 0: as many as fit memory.device_gb or the device,
    chosen by formulas when the run begins"""
    batch_warmup: Branch[tuple[BatchStage, ...]] = ()
    precision: Branch[Literal["fp32", "float64", "bf16", "fp16", "fp8"]] = "fp32"
    """bf16: fp32 parameters, bf16 compute, fp32 reduction; fp16: the same in float16, with a loss
    scale that adapts itself. fp8: bf16, with the blocks' products in float8, through torchao"""
    loss_chunk: Branch[Annotated[int, Field(ge=64)] | Literal["auto"]] = "auto"
    """tokens whose logits the loss holds at a time; the head, the softmax and their gradients are
    computed chunk by chunk. auto: 2^24 logits on a CPU, 2^28 on an accelerator, there a power of
    two; at least 64 tokens"""
    compile: Branch[bool] = Field(False, description="torch.compile of each block")
    recompute: InPlace[Recompute | tuple[Recompute, ...]] = "none"
    """what is run again in the backward pass, so that less is kept; the curve stays the same. full:
    each block, of which the input is kept; selective: all of it but recompute_keep. A list has a
    word for each stage of layout.pp"""
    recompute_keep: InPlace[tuple[KeptOperation, ...]] = DEFAULT_KEPT
    """operations whose results recompute selective keeps: matmul, products with weights; attention,
    its fused kernel; activation, that of the feed-forward"""
    partition_activations: InPlace[bool] = False
    """with recompute and tp: a rank keeps a part of each block's input, and the backward pass
    gathers it. With layout.sequence_parallel it has a part anyway"""
    keep_zeros: Branch[KeepZeros] = False
    qat: Branch[Qat] = "none"
    deterministic: Branch[bool] = True
    """on an accelerator, only kernels that give the same bits each time"""
    digest_every: InPlace[int] = Field(0, ge=0)
    """steps between two digests (SHA-256) of the weights in the journal, which `holdfast audit
    replay` compares; 0: only checkpoints tell what the weights were"""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: Branch[ScheduleConfig] = ScheduleConfig()
    evaluate: InPlace[EvaluateConfig] = EvaluateConfig()
    stop: InPlace[tuple[StopRuleConfig, ...]] = ()
    """rules that end the run before its last step: a target that is reached, a reward that
    collapses"""
    memory: InPlace[MemoryConfig] = MemoryConfig()
    profile: InPlace[ProfileConfig] = ProfileConfig()

    @field_validator("recompute", mode="before")
    @classmethod
    def _is_policy(cls, value: object) -> object:
        return check_words(value)

    @field_validator("microbatch_size", mode="before")
    @classmethod
    def _is_number(cls, value: object) -> object:
        return 0 if value == "auto" else value

    @property
    def schedule_steps(self) -> int:
        """The step at which the learning rate reaches its last value."""
        return self.schedule.steps or self.steps

    @property
    def recompute_words(self) -> tuple[Recompute, ...]:
        """The words of `recompute`: one, or one for each stage."""
        return (self.recompute,) if isinstance(self.recompute, str) else self.recompute

    @property
    def recomputes(self) -> bool:
        """Return True if blocks of some stage are run again."""
        return set(self.recompute_words) != {"none"}

    def recompute_of(self, stage: int, stages: int) -> Recompute:
        """The word for one stage of a pipeline of so many."""
        return word_of_stage(self.recompute, stage, stages)

    @property
    def movable_state(self) -> list[str]:
        """Keys of `memory` that could take more of the device's state elsewhere."""
        keys = ("optimizer", "gradients") if self.optimizer.name_with_state == "adamw" else ()
        return [key for key in keys if getattr(self.memory, key) == DEVICE]

    def broken_rules(self) -> Iterator[str]:
        for option in option_keys():
            yield option.refuse_train(self)
        for key in MOVABLE:
            place = getattr(self.memory, key)
            if place != DEVICE and self.optimizer.name_with_state != "adamw":
                yield (
                    f"memory.{key} {place} needs an update in pieces, which only adamw has, and "
                    f"optimizer.name is {self.optimizer.name_with_state}: use memory.{key}: "
                    f"device, or {self.optimizer.plain_adamw}"
                )
        is_selective = "selective" in self.recompute_words
        if self.compile and is_selective:
            yield (
                "recompute selective chooses among operations, which compile true fuses: use "
                "recompute full, or compile false"
            )
        if is_selective and not self.recompute_keep:
            yield (
                "recompute_keep [] keeps no results, as recompute full does: use recompute full, "
                "or recompute_keep [matmul]"
            )
        sizes = {"batch_size": self.batch_size}
        for index, stage in enumerate(self.batch_warmup):
            sizes[f"batch_warmup.{index}.batch_size"] = stage.batch_size
        for key, size in sizes.items() if self.microbatch_size else ():
            if size % self.microbatch_size:
                nearest = max(1, round(size / self.microbatch_size)) * self.microbatch_size
                yield (
                    f"{key} {size} is not a multiple of microbatch_size "
                    f"{self.microbatch_size}: use {nearest}"
                )
            if size > MAX_MICROBATCHES * self.microbatch_size:
                yield (
                    f"{key} {size} of microbatch_size {self.microbatch_size} is more than "
                    f"{MAX_MICROBATCHES} microbatches: use "
                    f"{MAX_MICROBATCHES * self.microbatch_size} or less"
                )
        for index, (before, stage) in enumerate(pairwise(self.batch_warmup), start=1):
            if stage.from_step <= before.from_step:
                is_last = before.from_step >= self.steps
                yield (
                    f"batch_warmup.{index}.from_step {stage.from_step} must be above the "
                    f"{before.from_step} of the stage before it: "
                    + ("remove the stage" if is_last else f"use {before.from_step + 1}")
                )
