"""A folder in Hugging Face form of a `CausalLM`, written by transformers itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.config.task import TaskConfig
from holdfast.model.huggingface_files import INDEX
from holdfast.model.huggingface_tokenizer import CHAT_TEMPLATE, copy_tokenizer
from holdfast.model.new_folder import new_folder
from holdfast.tasks.huggingface import CausalLM
from holdfast.tasks.loading import load_task

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")


def export_causal_lm(
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
    task = load_task(config)
    assert isinstance(task, CausalLM)
    model = task.with_values({name: read(name) for name in names})
    if dtype is not None:
        model.to(dtype)
    with new_folder(to) as partial:
        model.save_pretrained(partial, max_shard_size=shard_bytes)
        for path in sorted(task.folder.iterdir()):
            is_new = not (partial / path.name).exists() and path.name != INDEX
            if path.is_file() and path.suffix in _COPIED and is_new:
                shutil.copyfile(path, partial / path.name)
        if tokenizer is not None and not (partial / "tokenizer.json").exists():
            longest = getattr(model.config, "max_position_embeddings", None)
            copy_tokenizer(tokenizer, partial, int(longest or 0) or 10**30)
        if chat_template is not None:
            shutil.copyfile(chat_template, partial / CHAT_TEMPLATE)
