"""A trained `FolderModel` in Hugging Face form; of a `CausalLM` a session that continues a text."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.config.huggingface.folder import CHAT_TEMPLATE
from holdfast.config.huggingface.weight_files import INDEX
from holdfast.config.sections.task import TaskConfig
from holdfast.model.generate import refuse_long_text
from holdfast.model.huggingface_tokenizer import copy_tokenizer
from holdfast.model.new_folder import new_folder
from holdfast.tasks.task.loading import load_task
from holdfast.tasks.transformers.folder_model import COPIED, FolderModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def export_folder_model(
    to: Path,
    config: TaskConfig,
    names: tuple[str, ...],
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype | None,
    shard_bytes: int,
    tokenizer: Path | None,
    chat_template: Path | None,
) -> None:
    """Write the model with the parameters `names`, which `read` gives, and what else lay in the
    folder that it came from. The complete model is held in memory. tokenizer: the dataset's, for a
    folder without one. Raises UserError."""
    task, model = _trained(config, names, read)
    if dtype is not None:
        model.to(dtype)
    with new_folder(to) as partial:
        model.save_pretrained(partial, max_shard_size=shard_bytes)
        for path in sorted(task.folder.iterdir()):
            is_new = not (partial / path.name).exists() and path.name != INDEX
            if path.is_file() and path.suffix in COPIED and is_new:
                shutil.copyfile(path, partial / path.name)
        if tokenizer is not None and not (partial / "tokenizer.json").exists():
            longest = getattr(model.config, "max_position_embeddings", None)
            copy_tokenizer(tokenizer, partial, int(longest or 0) or 10**30)
        if chat_template is not None:
            shutil.copyfile(chat_template, partial / CHAT_TEMPLATE)


class CausalLMSession:
    """A model of transformers and the tokens it has read, with its own cache.

    capacity: of tokens. Raises UserError for more than the model has positions.
    """

    def __init__(self, model: Any, capacity: int) -> None:
        limit = _positions(model)
        if limit is not None:
            refuse_long_text(capacity, limit)
        self._model, self._cache = model, None

    def read(self, tokens: Tensor) -> Tensor:
        """tokens: [B, S], following those read before -> logits of the last one: [B, V]"""
        found = self._model(input_ids=tokens, past_key_values=self._cache, use_cache=True)
        self._cache = found.past_key_values
        logits: Tensor = found.logits[:, -1]
        return logits


class OpenCausalLM:
    """Opens sessions of a model of transformers. limit: its positions; None: not known."""

    def __init__(self, model: Any) -> None:
        self._model, self.limit = model, _positions(model)

    def __call__(self, capacity: int) -> CausalLMSession:
        return CausalLMSession(self._model, capacity)

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens: [B, S] -> logits after each of them: [B, S, V]"""
        found: Tensor = self._model(input_ids=tokens, use_cache=False).logits
        return found


def open_causal_lm(
    config: TaskConfig, names: tuple[str, ...], read: Callable[[str], Tensor]
) -> OpenCausalLM:
    """Return what opens sessions of the model with these parameters. Raises UserError."""
    _, model = _trained(config, names, read)
    return OpenCausalLM(model.eval())


def _positions(model: Any) -> int | None:
    limit = getattr(model.config, "max_position_embeddings", None)
    return None if limit is None else int(limit)


def _trained(
    config: TaskConfig, names: tuple[str, ...], read: Callable[[str], Tensor]
) -> tuple[FolderModel, Any]:
    """The task, and the complete model on the CPU. Raises UserError."""
    task = load_task(config)
    assert isinstance(task, FolderModel)
    return task, task.with_values({name: read(name) for name in names})
