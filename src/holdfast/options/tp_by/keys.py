"""`layout.tp_by`: lower degrees along tp for parts of a block."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from holdfast.config.sections.base import Section
from holdfast.errors import nearest_degrees
from holdfast.layout import component_degree
from holdfast.options.protocols import Checked, Keys

if TYPE_CHECKING:
    from holdfast.config.sections.degrees import ModuleCuts
    from holdfast.config.sections.layout import DegreesConfig, LayoutConfig
    from holdfast.config.sections.model import ModelConfig


class ComponentDegrees(Section):
    """Degrees along tp of parts of a block. Several workers hold the same of a part with a lower
    degree, and each of them computes other samples or tokens."""

    attention: int = Field(
        0, ge=0, description="workers that share attention's heads; 0: those of layout.tp"
    )
    ffn: int = Field(
        0, ge=0, description="workers that share the feed-forward; 0: those of layout.tp"
    )

    @property
    def degrees(self) -> dict[str, int]:
        """The components that have a degree of their own."""
        return {name: n for name, n in self if n}

    def at(self, tp: int) -> tuple[int, int]:
        """The parts of attention and of the feed-forward in a replica with this tp."""
        return component_degree(self.attention, tp), component_degree(self.ffn, tp)

    def within(self, tp: int) -> ComponentDegrees:
        """The same in a replica with this tp, which may be lower than the run file's."""
        return ComponentDegrees(**{n: component_degree(d, tp) for n, d in self.degrees.items()})


TpBy = Annotated[
    ComponentDegrees,
    Field(description="with tp: lower degrees for parts of a block, which tp must be divisible by"),
]


class OptionKeys(Keys):
    key: ClassVar[str] = "layout.tp_by"

    def refuse(self, run: Checked) -> str:
        """Check that the degrees of components divide that of tp, and that there is code for
        them."""
        layout, model = run.layout, run.model
        if sentence := _components(layout, model, run.cuts):
            return sentence
        name, degree = next(iter(layout.tp_by.degrees.items()), ("", 0))
        if name and run.train.precision == "fp8" and model.experts is None:
            return (  # its products have as many rows as the rules of float8 think
                f"train.precision fp8 has not been tried with layout.tp_by.{name} {degree}: use "
                f"layout.tp_by.{name} 0, or train.precision bf16"
            )
        if name and layout.async_tp:
            return (
                f"layout.tp_by.{name} {degree} does not work with layout.async_tp true: use "
                "layout.async_tp false"
            )
        if name and layout.quantized != "none":
            return (
                f"layout.quantized {layout.quantized} has not been tried with layout.tp_by: "
                "use layout.quantized: none"
            )
        return ""

    def refuse_replica(self, run: Checked, key: str, degrees: DegreesConfig) -> str:
        return _tensor(key, degrees.tp, run.layout, run.model) if run.has_decoder else ""


def _components(layout: LayoutConfig, model: ModelConfig, cuts: ModuleCuts | None) -> str:
    """Check that the degrees of components divide that of tp, and that there is code for them."""
    key, widest = max(layout.kinds, key=lambda kind: kind[1].tp)
    for name, degree in layout.tp_by.degrees.items():
        said = f"layout.tp_by.{name} {degree}"
        if cuts is not None:
            return f"{said} cuts the built-in decoder, and {cuts.trained} is trained: use 0"
        if widest.tp % degree:
            uncut = _uncut_heads if name == "attention" else _uncut_units
            parts = [d for d in range(1, widest.tp + 1) if widest.tp % d == 0]
            good = frozenset(d for d in parts if not uncut(d, model))
            near = nearest_degrees(degree, good.__contains__, widest.tp)
            return f"{said} does not divide {key}.tp {widest.tp}: use {near}"
        if name == "ffn" and model.experts is not None and degree < widest.tp:
            return f"{said} is for feed-forwards without experts, and there is model.experts: use 0"
    return ""


def _tensor(key: str, tp: int, layout: LayoutConfig, model: ModelConfig) -> str:
    """Check that tp, or a component's degree, cuts no query head and cuts the inner dim evenly.

    A key/value head is undivided or shared. Vocabulary and tokens may be cut unevenly.
    """
    attention, ffn = layout.tp_by.at(tp)
    if what := _uncut_heads(attention, model):
        own, check = layout.tp_by.attention, _uncut_heads
    elif what := _uncut_units(ffn, model):
        own, check = layout.tp_by.ffn, _uncut_units
    else:
        return ""
    name, degree = ("attention", attention) if check is _uncut_heads else ("ffn", ffn)
    if own:
        near = nearest_degrees(degree, lambda d: tp % d == 0 and not check(d, model), tp)
        return f"layout.tp_by.{name} {degree} {what}: use {near}"

    def works(d: int) -> bool:
        attention, ffn = layout.tp_by.at(d)
        return not (_uncut_heads(attention, model) or _uncut_units(ffn, model))

    near = nearest_degrees(tp, works, model.heads)
    lower = max(d for d in range(1, tp) if tp % d == 0 and not check(d, model))
    if model.experts is None and lower > 1 and (name == "ffn" or not _uncut_units(ffn, model)):
        near += f", or layout.tp_by.{name} {lower}"
    return f"{key}.tp {tp} {what}: use {near}"


def _uncut_heads(degree: int, model: ModelConfig) -> str:
    """Why so many workers cannot share attention, after their degree; "" if they can."""
    heads, kv_heads = model.heads, model.kv_heads
    if degree > 1 and model.qk_norm_width == "all":
        return "cannot cut a norm that spans all heads (qk_norm_width all)"
    if heads % degree:
        return f"does not divide model.heads {heads}"
    if kv_heads % degree and degree % kv_heads:
        return f"neither divides model.kv_heads {kv_heads} nor is a multiple of it"
    return ""


def _uncut_units(degree: int, model: ModelConfig) -> str:
    """The same for the feed-forward."""
    inner = model.inner_dim
    if model.experts is not None and model.experts.first:
        inner = gcd(inner, model.ffn_dim)
    if inner % degree == 0:
        return ""
    key_of = "model.experts.width" if model.experts and model.experts.width else "model.ffn_dim"
    return f"does not divide {key_of} {inner}"
