"""A causal language model of `transformers`, by its own modelling code, as a task.

`model: {from: FOLDER, code: transformers}` of a run file trains it on the prepared tokens.
Attention is torch's SDPA. The package is imported by what uses it, not by this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.config.huggingface.folder import CONFIG
from holdfast.errors import TaskError
from holdfast.parallel.axes.tensor_layers import SHARED_INSIDE, STYLES
from holdfast.tasks.task.module import evaluation_mode
from holdfast.tasks.task.task import Batch, Task
from holdfast.training.engine.objective import IGNORED_TARGET

_PROBE = 4  # tokens of each of the two documents that are kept apart
_APART = 1e-4  # relative difference of logits that another document may make: rounding


class CausalLM(Task):
    """Any model that `AutoModelForCausalLM` loads from a folder.

    folder: in Hugging Face form. pretrained: begin with the folder's weights; otherwise the shape
    alone is taken. trust_remote_code: run the folder's own modelling code.
    """

    def __init__(
        self, folder: str, *, pretrained: bool = True, trust_remote_code: bool = False
    ) -> None:
        self.folder, self._is_pretrained = Path(folder), pretrained
        self._trust_remote_code = trust_remote_code
        self._keeps_apart: bool | None = None
        if not (self.folder / CONFIG).is_file():
            raise TaskError(
                f"there is no {CONFIG} in {folder}",
                where="task.args.folder",
                remedy="name the folder of a model in Hugging Face form",
            )
        if pretrained and not next(self.folder.glob("*.safetensors"), None):
            raise TaskError(
                f"there are no weights in {folder}: it has no file *.safetensors",
                where="task.args.folder",
                remedy="fetch it again, or set task.args.pretrained=false for the shape alone",
            )

    def model(self) -> nn.Module:
        """On the meta device the shape. Elsewhere the buffers' values, and those of the parameters
        only if they are not the folder's."""
        config = deepcopy(self._config)
        if torch.get_default_device().type == "meta":
            return self._of_config(config)
        if not self._is_pretrained:
            return self._of_config(config)
        # Whether a buffer's values come from the folder, not from the config.
        stored = set(self._meta.state_dict())
        if any(name in stored for name, _ in self._meta.named_buffers()):
            return self._loaded()
        from transformers.initialization import no_init_weights

        with no_init_weights():
            made: Any = self._of_config(config)
        made.tie_weights()  # which is left out with the values
        module: nn.Module = made
        return module

    def weights(self) -> Mapping[str, Tensor]:
        """The folder's. Raises TaskError if it lacks some."""
        return dict(self._loaded().named_parameters()) if self._is_pretrained else {}

    def files(self) -> Sequence[Path]:
        """The config, and the modelling code if it is the folder's."""
        code = sorted(self.folder.glob("*.py")) if self._trust_remote_code else []
        return [self.folder / CONFIG, *code]

    def vocabulary(self) -> int:
        """Token ids that the model knows."""
        return int(self._config.get_text_config().vocab_size)

    def casts(self, buffer: str) -> bool:
        """Buffers are tables of positions and the like: they keep their dtype, as transformers
        has it."""
        return False

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
        wide = logits if logits.dtype == torch.float64 else logits.float()
        weights = batch.get("weights")
        losses = F.cross_entropy(
            wide.flatten(0, 1),
            batch["targets"].flatten(),
            ignore_index=IGNORED_TARGET,
            reduction="sum" if weights is None else "none",
        )
        return losses if weights is None else (losses * weights.flatten()).sum()

    def with_values(self, values: Mapping[str, Tensor]) -> Any:
        """The complete model on the CPU, with these parameters by name. Layers that share one in
        the folder have a matrix each if `values` has one for each."""
        model: Any = self.model()
        own = {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.data = values[name]
        for name in values.keys() - own:
            layer, _, key = name.rpartition(".")
            setattr(model.get_submodule(layer), key, nn.Parameter(values[name]))
            model.config.tie_word_embeddings = False
        return model

    @cached_property
    def _config(self) -> Any:
        """Raises TaskError for what is no decoder."""
        auto = _transformers().AutoConfig
        config = auto.from_pretrained(self.folder, **self._origin())
        if getattr(config, "is_encoder_decoder", False):
            raise TaskError(
                f"{config.model_type} is an encoder-decoder, which does not continue a text",
                where="task.args.folder",
                remedy="write a task of your own for it (docs/guide/python.md)",
            )
        return config

    @cached_property
    def _meta(self) -> nn.Module:
        with torch.device("meta"):
            return self.model()

    def _origin(self) -> dict[str, Any]:
        return {"local_files_only": True, "trust_remote_code": self._trust_remote_code}

    def _of_config(self, config: Any) -> nn.Module:
        """Raises TaskError for a model without attention by SDPA."""
        try:
            made: nn.Module = _transformers().AutoModelForCausalLM.from_config(
                config,
                attn_implementation="sdpa",
                dtype=torch.float32,
                trust_remote_code=self._trust_remote_code,
            )
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            raise TaskError(
                f"{config.model_type} has no attention by SDPA in transformers",
                where="task.args.folder",
                remedy="use another model, or write a task of your own for it "
                "(docs/guide/python.md)",
            ) from error
        return made.train()

    def _loaded(self) -> nn.Module:
        """The model with the folder's weights. Raises TaskError if some are missing."""
        auto = _transformers().AutoModelForCausalLM
        model, told = auto.from_pretrained(
            self.folder,
            attn_implementation="sdpa",
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            **self._origin(),
        )
        if missing := sorted(told["missing_keys"]):
            raise TaskError(
                f"the weights in {self.folder} lack {missing[0]}",
                where="task.args.folder",
                remedy="fetch it again",
            )
        loaded: nn.Module = model
        return loaded.train()

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


def _transformers() -> Any:
    """Raises TaskError if the package is missing."""
    try:
        import transformers
    except ImportError as error:
        raise TaskError(
            f"model.code transformers needs the package transformers ({error})",
            where="model.code",
            remedy="pip install 'holdfast[hf]'",
        ) from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


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
