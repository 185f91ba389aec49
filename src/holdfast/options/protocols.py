"""What an option of the run file may define. The default of each member changes nothing.

`docs/internals/design.md` says which file of an option has what, and who loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from holdfast.config.run import RunConfig
    from holdfast.config.sections.degrees import ModuleCuts
    from holdfast.config.sections.layout import DegreesConfig, LayoutConfig
    from holdfast.config.sections.model import ModelConfig
    from holdfast.config.sections.optimizer import OptimizerConfig
    from holdfast.config.sections.train import TrainConfig
    from holdfast.core.sharding.boxes import Box
    from holdfast.core.sharding.parameters import Parameter
    from holdfast.layout import Topology
    from holdfast.parallel.axes.expert_parallel import ExpertExchange
    from holdfast.parallel.axes.fsdp import ShardCodes
    from holdfast.parallel.axes.tensor_parallel import DecoderObjective, MakeRegion
    from holdfast.training.engine.engine import StepEngine
    from holdfast.training.engine.executors import Executor
    from holdfast.training.engine.state import Parameters
    from holdfast.training.optimizers.optimizer import Optimizer

Rule = tuple[str, bool, str]
"""A key, whether it has no effect, and with which other setting."""
Table = tuple[Sequence[Sequence[object]], Sequence[str]]
"""Rows and their head."""
PicturePart = Literal["ranks", "activations", "estimate"]
"""A part of what `holdfast layout show` prints."""


@dataclass(frozen=True)
class Checked:
    """The sections of a run file that refusals look at."""

    layout: LayoutConfig
    model: ModelConfig
    train: TrainConfig
    cuts: ModuleCuts | None  # of what is trained; None: it is the decoder

    @property
    def has_decoder(self) -> bool:
        """Return True if the decoder is trained, or adapters of it."""
        return self.cuts is None or self.cuts.of_decoder


class Keys(Protocol):
    """What a run file may say of an option. Refusals are sentences, "... : use ...", or ""."""

    key: ClassVar[str]

    def is_used(self, section: Any) -> bool:
        """Return True if a section with the key asks for the option's effect."""
        name = self.key.split(".")[-1]
        return bool(getattr(section, name) != type(section).model_fields[name].default)

    def refuse(self, run: Checked) -> str:
        return ""

    def refuse_replica(self, run: Checked, key: str, degrees: DegreesConfig) -> str:
        """Check one kind of replica. key: its place in the run file."""
        return ""

    def refuse_train(self, train: TrainConfig) -> str:
        return ""

    def without_effect(self, layout: LayoutConfig) -> Iterable[Rule]:
        return ()

    def notices(self, layout: LayoutConfig) -> Iterable[str]:
        """Return the lines that a run prints when it starts."""
        return ()


class Formatting(Protocol):
    """The functions of `report.formatting` that lines of a cost need."""

    def format_bytes(self, value: float) -> str: ...
    def format_plural(self, count: int, noun: str) -> str: ...


class Cost(Protocol):
    """What formulas say of an option's cost."""

    shown_after: ClassVar[PicturePart] = "ranks"
    formula_key: ClassVar[str] = ""  # named where no formula of the memory covers a run

    def unmodelled(self, config: RunConfig) -> str:
        """Return the key that keeps the planner from predicting a step, with its value; or ""."""
        return ""

    def has_formula(self, config: RunConfig) -> bool:
        """Return True if the formulas of the memory cover what the option does."""
        return not self.unmodelled(config)

    def describe(
        self, config: RunConfig, topology: Topology, formatting: Formatting
    ) -> Iterable[str | Table]:
        """Return what `holdfast layout show` prints."""
        return ()


MakeOptimizer = Callable[
    [
        "OptimizerConfig",
        "Sequence[Parameter]",
        "Sequence[Tensor]",
        "Sequence[Tensor]",
        "Sequence[Box] | None",
    ],
    "Optimizer",
]
"""(settings, rows, parameters, gradients, boxes; None: all of each)."""
WrapExecutor = Callable[
    ["RunConfig", "Executor", "Parameters", "Callable[[], Mapping[str, Tensor]]"],
    "tuple[Executor, Parameters]",
]
"""(run, what runs the passes, what they compute with, the parameters by name)."""


@dataclass(frozen=True)
class Apply:
    """The effect of an option: hooks into parallel and train."""

    region: MakeRegion | None = None  # around a component that fewer ranks cut than tp has
    halves: Callable[[DecoderObjective], None] | None = None  # of a decoder that tp cuts
    expert_exchange: type[ExpertExchange] | None = None  # takes tokens to their experts and back
    shard_codes: Callable[[LayoutConfig], ShardCodes] | None = None  # of what FSDP2 sends
    optimizer: MakeOptimizer | None = None
    executor: WrapExecutor | None = None
    engine: Callable[[RunConfig, StepEngine], None] | None = None  # changes the complete engine
    units: Callable[[RunConfig, Sequence[nn.Module]], None] | None = None  # changes their layers
