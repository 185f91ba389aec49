"""A model of `transformers` says how tensor parallelism cuts it (`tp_plan`): as a task's table."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from holdfast.parallel.axes.tensor_layers import SHARED_INSIDE, STYLES

_KEY_VALUE = ("k_proj", "v_proj", "key", "value")
_ENDS = ("embedding_rowwise", "colwise_gather_output")
"""Styles of the embedding and the head, which work without the rest of the plan, and it without
them."""


def tensor_plan(model: Any) -> Mapping[str, str | tuple[str, int]]:
    """The table of a model on any device. It is empty for a model without a plan, or whose plan has
    a style or a class of layer that Holdfast cannot cut.

    Heads stay in one piece. Embedding and head stay complete if one of them cannot be cut."""
    layers = {name: layer for name, layer in model.named_modules() if name}
    found: dict[str, str | tuple[str, int]] = {}
    leaves_ends = False
    for pattern, style in (getattr(model, "tp_plan", None) or {}).items():
        hit = [layer for name, layer in layers.items() if _fits(pattern, name)]
        if hit and not _can_cut(style, hit):
            if style not in _ENDS:
                return {}
            leaves_ends = True
        if hit:
            parts = _parts(pattern, style, model.config.get_text_config())
            found[pattern] = (style, parts) if parts else style
    if leaves_ends or _is_tied_alone(model, found):
        return {pattern: cut for pattern, cut in found.items() if cut not in _ENDS}
    return found


def _fits(pattern: str, name: str) -> bool:
    return pattern.count(".") == name.count(".") and fnmatchcase(name, pattern)


def _can_cut(style: str, layers: list[nn.Module]) -> bool:
    if style == SHARED_INSIDE:
        return True
    return style in STYLES and all(type(layer) is STYLES[style].of for layer in layers)


def _parts(pattern: str, style: str, config: Any) -> int:
    """The heads in a layer of attention; 0 for another layer."""
    *before, last = pattern.split(".")
    if style not in ("colwise", "rowwise") or not any("att" in part for part in before):
        return 0
    heads = int(config.num_attention_heads)
    if style == "colwise" and last in _KEY_VALUE:
        return int(getattr(config, "num_key_value_heads", None) or heads)
    return heads


def _is_tied_alone(model: Any, found: Mapping[str, Any]) -> bool:
    """Whether the head has the embedding's matrix, and the plan names one of both alone."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    return len({style for style in found.values() if style in _ENDS}) == 1
