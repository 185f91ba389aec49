"""A causal language model of `transformers`, by its own modelling code, as a task.

`model: {from: FOLDER, code: transformers}` of a run file trains it on the prepared tokens.
Attention is torch's SDPA. The package is imported by what uses it, not by this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from holdfast.errors import TaskError
from holdfast.parallel.axes.tensor_layers import SHARED_INSIDE, STYLES
from holdfast.tasks.task.module import evaluation_mode
from holdfast.tasks.task.task import Batch
from holdfast.tasks.transformers.folder_model import FolderModel, token_losses

_PROBE = 4  # tokens of each of the two documents that are kept apart
_APART = 1e-4  # relative difference of logits that another document may make: rounding


class CausalLM(FolderModel):
    """Any model that `AutoModelForCausalLM` loads from a folder."""

    auto: ClassVar[str] = "AutoModelForCausalLM"

    def __init__(
        self, folder: str, *, pretrained: bool = True, trust_remote_code: bool = False
    ) -> None:
        super().__init__(folder, pretrained=pretrained, trust_remote_code=trust_remote_code)
        self._keeps_apart: bool | None = None

    def sharding(self) -> Mapping[str, str | tuple[str, int]]:
        """The model's own plan; none if it has none that Holdfast can follow."""
        return tensor_plan(self._meta)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy, summed over the targets, each by its weight."""
        documents, given = batch.get("documents"), dict[str, Any]()
        if documents is not None:
            self._check_documents_apart(model, batch["inputs"])
            given["position_ids"] = positions_in_documents(documents)
        logits = model(input_ids=batch["inputs"], use_cache=False, **given).logits  # [B, S, V]
        return token_losses(logits, batch["targets"], batch.get("weights"))

    def check_config(self, config: Any) -> None:
        if getattr(config, "is_encoder_decoder", False):
            raise TaskError(
                f"{config.model_type} is an encoder-decoder, which does not continue a text",
                where="task.args.folder",
                remedy="name recordings with their texts in task.args.shards, or write a task of "
                "your own for it (docs/guide/python.md)",
            )

    def _check_documents_apart(self, model: nn.Module, like: Tensor) -> None:
        """Once: a change in a row's first document changes nothing in the next one. Raises
        TaskError. All shards of a replica come here in the same pass."""
        if self._keeps_apart is None:
            takes = inspect.signature(type(self._meta).forward).parameters
            self._keeps_apart = "position_ids" in takes and self._compares_equal(model, like)
        if not self._keeps_apart:
            raise TaskError(
                f"{type(self._meta).__name__} of transformers lets a document see the one before "
                "it in a row",
                where="data.attention",
                remedy="use full, or another model",
            )

    def _compares_equal(self, model: nn.Module, like: Tensor) -> bool:
        last = self.vocabulary() - 1
        ids = torch.arange(2 * _PROBE, device=like.device).clamp(max=last).repeat(2, 1)
        ids[1, :_PROBE] = ids[0, :_PROBE].flip(0)
        at = torch.arange(_PROBE, device=like.device).repeat(2, 2)
        with torch.no_grad(), evaluation_mode(model):
            logits = model(input_ids=ids, position_ids=at, use_cache=False).logits[:, _PROBE:]
        one, other = logits.double()
        return bool((one - other).norm() <= _APART * one.norm())


def positions_in_documents(documents: Tensor) -> Tensor:
    """documents: [B, S], rising in a row. The place of each token in its own document: [B, S].
    transformers keeps documents apart where the places begin at 0 again."""
    places = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    start = torch.where(begins, places, 0).cummax(1).values
    return places - start


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
