"""The section `train.optimizer`, and what each optimizer takes and keeps, as data.

`core/sharding/optimizer_state.py` derives the state's shapes from it. So agent and mover know all
tensors, and import no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from holdfast.config.sections.base import Branch, Never, Section
from holdfast.errors import nearest_of
from holdfast.options.short_state.keys import BLOCK, SMALLEST_IN_8BIT, StateDtype

Beta = Annotated[float, Field(ge=0, lt=1)]

ELEMENTWISE, ROWS, COLUMNS, SCALAR = "elementwise", "rows", "columns", "scalar"
STEP, COUNT = "step", "count"
BLOCKS = "blocks"
"""A scale for each `BLOCK` elements of a row. Only a built-in optimizer has it."""
DECLARED = (ELEMENTWISE, ROWS, COLUMNS, SCALAR)
"""Shapes that a class may declare. STEP and COUNT are the number of updates, as a tensor and as a
number: they follow from the step."""

ALL, VECTORS, MATRICES, HIDDEN, REST = "all", "vectors", "matrices", "hidden", "rest"
OWNERS = (ALL, VECTORS, MATRICES, HIDDEN, REST)

OBJECT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor that an optimizer keeps for a parameter.

    rule: its shape. of: the parameters that have it. MATRICES have two dims or more, VECTORS one.
    HIDDEN are the matrices that Muon updates, REST is all that it does not. only: the names of
    those parameters, if a script has several optimizers or groups that differ; "" for all.
    """

    name: str
    rule: str = ELEMENTWISE
    of: str = ALL
    only: str = ""

    def is_of(self, parameter: str) -> bool:
        """Return True if `only` does not rule the parameter out."""
        return not self.only or f",{parameter}," in f",{self.only},"

    @property
    def text(self) -> str:
        return f"{self.name} {self.rule} {self.of} {self.only}".rstrip()

    @staticmethod
    def of_text(text: str) -> Slot:
        """Raises ValueError for what `text` did not write."""
        name, rule, of, only = (text if text.count(" ") > 2 else f"{text} ").split(" ", 3)
        if rule not in (*DECLARED, STEP, COUNT) or of not in OWNERS:
            raise ValueError(f"{text!r} is no slot")
        return Slot(name, rule, of, only)


@dataclass(frozen=True)
class BuiltIn:
    """options: the keys that it takes in addition to those of all, with their defaults here.

    layouts: the axes that may cut what it updates.
    """

    options: Mapping[str, Any]
    slots: tuple[Slot, ...]
    layouts: tuple[str, ...] = ("pp", "dp_shard", "tp")


_ADAMW_OPTIONS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_SHORT_STATE = {"state_dtype": "fp32"}
BUILT_IN = {
    "adamw": BuiltIn(_ADAMW_OPTIONS | _SHORT_STATE, (Slot("exp_avg"), Slot("exp_avg_sq"))),
    "sgd": BuiltIn(
        {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0} | _SHORT_STATE,
        (Slot("momentum_buffer"),),
    ),
    "lion": BuiltIn({"betas": (0.9, 0.99), "weight_decay": 0.1} | _SHORT_STATE, (Slot("exp_avg"),)),
    "adafactor": BuiltIn(
        {"beta2_decay": -0.8, "clip_threshold": 1.0, "smallest_scale": 1e-3, "weight_decay": 0.0},
        (
            Slot("row_var", ROWS, MATRICES),
            Slot("col_var", COLUMNS, MATRICES),
            Slot("variance", ELEMENTWISE, VECTORS),
            Slot("step", STEP),
        ),
        ("pp",),
    ),
    "muon": BuiltIn(
        _ADAMW_OPTIONS
        | {
            "momentum": 0.95,
            "nesterov": True,
            "newton_schulz_steps": 5,
            "adjust_rate": "match_rms_adamw",
            "adamw_for": ("*embed*", "*wte*", "*wpe*", "*head.weight"),
        },
        (
            Slot("momentum_buffer", ELEMENTWISE, HIDDEN),
            Slot("exp_avg", ELEMENTWISE, REST),
            Slot("exp_avg_sq", ELEMENTWISE, REST),
        ),
        (),
    ),
}
OF_ALL = ("learning_rate", "weight_decay", "clip_norm", "groups")
"""Keys that each optimizer takes."""
REPLICAS = "dp_replicate"
"""The axis that cuts nothing. It is in `layouts` of each class that was asked."""
PLANNED_KEYS = ("source", "slots", "layouts")


class GroupConfig(Section):
    """Settings of the parameters whose names match. The first group that matches counts."""

    match: str = Field(min_length=1)
    """pattern of names, for example `*norm*`; `*` is any text"""
    weight_decay: float | None = Field(None, ge=0)
    """none: train.optimizer.weight_decay, of matrices only"""
    learning_rate_scale: float = Field(1.0, ge=0, description="times the learning rate of the step")


class OptimizerConfig(Section):
    """`adamw` is AdamW (Loshchilov and Hutter, 2019), fused. Matrices decay, vectors do not.
    [optimizers.md](../guide/optimizers.md) describes all of them."""

    name: Never[str] = "adamw"
    """adamw, sgd, lion, adafactor, muon, or a class by its path: `torch.optim.RMSprop`,
    `my_module:MyOptimizer`"""
    learning_rate: Branch[float] = Field(3e-3, gt=0, description="the schedule's peak")
    betas: Branch[tuple[Beta, Beta]] = (0.9, 0.95)
    """adamw, lion, muon: decay of the two moments; lion: (0.9, 0.99)"""
    eps: Branch[float] = Field(1e-8, gt=0)
    """adamw, muon: added to the root of the second moment"""
    weight_decay: Branch[float] = Field(0.1, ge=0)
    """of matrices only; decoupled but for sgd. sgd, adafactor, a class: 0"""
    clip_norm: Branch[float] = Field(1.0, ge=0, description="largest global norm; 0: no clipping")
    momentum: Branch[float | None] = Field(None, ge=0, lt=1, description="sgd: 0.9; muon: 0.95")
    nesterov: Branch[bool | None] = Field(None, description="sgd: false; muon: true")
    beta2_decay: Branch[float | None] = Field(None, le=0)
    """adafactor: -0.8, the exponent of the second moment's decay"""
    clip_threshold: Branch[float | None] = Field(None, ge=1)
    """adafactor: 1, the largest root mean square of an update"""
    smallest_scale: Branch[float | None] = Field(None, gt=0)
    """adafactor: 1e-3, the least scale of a parameter"""
    newton_schulz_steps: Branch[int | None] = Field(None, ge=1, lt=100)
    """muon: 5 steps of the Newton-Schulz iteration"""
    adjust_rate: Branch[Literal["match_rms_adamw", "original"] | None] = None
    """muon: how the rate depends on a matrix's shape"""
    adamw_for: Never[tuple[str, ...]] = ()
    """muon: patterns of matrices that AdamW updates: embeddings and head"""
    state_dtype: Never[StateDtype] = "fp32"
    groups: Branch[tuple[GroupConfig, ...]] = ()
    args: Branch[dict[str, Any]] = Field(default_factory=dict)
    """a class: its other keyword arguments"""
    source: Branch[str] = Field("", description="digest of a class's source files (planned)")
    slots: Never[tuple[str, ...]] = ()
    """what a class keeps for a parameter: name, shape, of which (planned)"""
    layouts: Never[tuple[str, ...]] = ()
    """axes that may cut what a class updates (planned)"""

    @model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, value: Any) -> Any:
        """The chosen optimizer's defaults, where they are not those of AdamW."""
        if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
            return value
        if name == "adamw":
            return value
        options = BUILT_IN[name].options if name in BUILT_IN else {"weight_decay": 0.0}
        return value | {key: own for key, own in options.items() if value.get(key) is None}

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name in BUILT_IN or OBJECT_PATH.fullmatch(name):
            return name
        raise ValueError(
            f"{name!r} is none of {', '.join(BUILT_IN)}, nor the path of a class such as "
            f"torch.optim.RMSprop: use {nearest_of(name, BUILT_IN) or 'adamw'}"
        )

    def broken_rules(self) -> Iterator[str]:
        for key in self.unused_keys:
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            if getattr(self, key) != default:
                own = not self._built_in and key != "state_dtype"
                remedy = f"use train.optimizer.args.{key}" if own else "remove it"
                taken = ", ".join(self._taken_keys)
                yield f"{key} is no option of {self.name}, which takes {taken}: {remedy}"
        if "lr" in self.args:
            yield "args has lr, which learning_rate gives: use learning_rate"
        if self.nesterov and not self.momentum:
            yield "nesterov needs momentum: use momentum 0.9, or nesterov false"

    @property
    def _built_in(self) -> BuiltIn | None:
        return BUILT_IN.get(self.name)

    @property
    def _taken_keys(self) -> tuple[str, ...]:
        own = self._built_in.options if self._built_in else ("args",)
        return tuple(dict.fromkeys((*OF_ALL, *own)))

    @property
    def unused_keys(self) -> tuple[str, ...]:
        """The options of other optimizers."""
        known = ("name", *PLANNED_KEYS, *self._taken_keys)
        return tuple(key for key in type(self).model_fields if key not in known)

    @property
    def name_with_state(self) -> str:
        """The name; with state_dtype, if its state is no moments in the parameters' dtype."""
        short = self.state_dtype != "fp32"
        return f"{self.name} with state_dtype {self.state_dtype}" if short else self.name

    @property
    def plain_adamw(self) -> str:
        """The keys, next to the present ones, with which it is AdamW on moments of full length."""
        short = " and optimizer.state_dtype: fp32" if self.state_dtype != "fp32" else ""
        return f"optimizer.name: adamw{short}"

    @property
    def is_class(self) -> bool:
        """Return True for a class by its path."""
        return self.name not in BUILT_IN

    @property
    def state_slots(self) -> tuple[Slot, ...]:
        """What it keeps for each parameter."""
        if self._built_in is None:
            return tuple(map(Slot.of_text, self.slots))
        if self.name == "sgd" and not self.momentum:
            return ()
        slots = self._built_in.slots
        if self.state_dtype == "8bit":
            slots += tuple(Slot(f"{slot.name}_scale", BLOCKS) for slot in slots)
        return slots

    def is_in_8bit(self, shape: tuple[int, ...]) -> bool:
        """Return True for a parameter whose state is kept in 8 bits. Its rows have a block at
        least."""
        long = prod(shape[1:]) >= BLOCK and prod(shape) >= SMALLEST_IN_8BIT
        return self.state_dtype == "8bit" and len(shape) > 1 and long

    @property
    def moment_bytes(self) -> int:
        """Bytes of an element of a moment; 0: those of a parameter's."""
        return {"fp32": 0, "bf16": 2, "8bit": 1}[self.state_dtype]

    @property
    def allowed_axes(self) -> tuple[str, ...]:
        """The axes that may cut what it updates."""
        return self.layouts if self._built_in is None else self._built_in.layouts
