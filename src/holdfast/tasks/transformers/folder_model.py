"""A model of `transformers` out of a folder, by its own modelling code. It is the part of a task
that does not depend on what the model reads.

Attention is torch's SDPA. The package is imported by what uses it, not by this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.config.huggingface.folder import CONFIG
from holdfast.errors import TaskError
from holdfast.tasks.task.task import Task
from holdfast.training.engine.objective import IGNORED_TARGET

COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""Files of a folder that an export gives back as they are, next to weights and config."""


class FolderModel(Task):
    """A model that one of transformers' `Auto` classes loads from a folder.

    folder: in Hugging Face form. pretrained: begin with the folder's weights; otherwise the shape
    alone is taken. trust_remote_code: run the folder's own modelling code.
    """

    auto: ClassVar[str]  # transformers' class

    def __init__(
        self, folder: str, *, pretrained: bool = True, trust_remote_code: bool = False
    ) -> None:
        self.folder, self._is_pretrained = Path(folder), pretrained
        self._trust_remote_code = trust_remote_code
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
        """Raises TaskError for what this task does not train."""
        auto = transformers_package().AutoConfig
        config = auto.from_pretrained(self.folder, **self._origin())
        self.check_config(config)
        return config

    def check_config(self, config: Any) -> None:
        """Raise TaskError for the config of a model that this task does not train."""

    @cached_property
    def _meta(self) -> nn.Module:
        with torch.device("meta"):
            return self.model()

    @property
    def _auto(self) -> Any:
        return getattr(transformers_package(), self.auto)

    def _origin(self) -> dict[str, Any]:
        return {"local_files_only": True, "trust_remote_code": self._trust_remote_code}

    def _of_config(self, config: Any) -> nn.Module:
        """Raises TaskError for a model without attention by SDPA."""
        try:
            made: nn.Module = self._auto.from_config(
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
        model, told = self._auto.from_pretrained(
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


def token_losses(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross entropy, summed over the targets, each by its weight. logits: [B, S, V]"""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(
        wide.flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORED_TARGET,
        reduction="sum" if weights is None else "none",
    )
    return losses if weights is None else (losses * weights.flatten()).sum()


def transformers_package() -> Any:
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
