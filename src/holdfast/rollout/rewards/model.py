"""A reward model as a reward: a sequence classifier with one label that transformers opens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from holdfast.config.sections.rewards import RewardConfig
from holdfast.data.read.files import file_checksum
from holdfast.errors import RewardError
from holdfast.rollout.prompts import Prompt

_FILES = ("*.safetensors", "*.bin", "config.json", "tokenizer.json", "chat_template.jinja")


class ModelReward:
    """Rates one completion at a time, in float32 on the CPU. Raises RewardError for a folder that
    is no reward model."""

    def __init__(self, entry: RewardConfig, where: str):
        self._where, folder = where, Path(entry.place)
        self.source = ""
        if not folder.is_dir():
            raise self._refusal(f"{folder} does not exist", "name the folder of a reward model")
        files = sorted({path for name in _FILES for path in folder.glob(name)})
        self.source = " ".join(f"{path.name} {file_checksum(path)}" for path in files)
        try:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        except ImportError:
            what = "a reward model needs transformers, which is not installed"
            raise self._refusal(what, "pip install transformers") from None
        try:
            local = {"local_files_only": True}
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, **local)
            self._model: Any = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=torch.float32, **local
            ).eval()
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            what = f"{folder} is not opened as a sequence classifier ({said})"
            raise self._refusal(what, "name the folder of a reward model") from None
        if (labels := self._model.config.num_labels) != 1:
            what = f"{folder} has {labels} labels, and a reward model has one"
            raise self._refusal(what, "name the folder of a reward model")

    def rate(self, prompt: Prompt, text: str, ids: Sequence[int]) -> float:
        if isinstance(prompt.said, str):
            found = self._tokenizer(prompt.said + text, return_tensors="pt")
        else:
            messages = [*prompt.said, {"role": "assistant", "content": text}]
            found = self._tokenizer.apply_chat_template(
                messages, return_tensors="pt", return_dict=True
            )
        longest = getattr(self._model.config, "max_position_embeddings", None)
        if longest is not None and found["input_ids"].shape[1] > longest:
            raise self._refusal(
                f"prompt {prompt.number} and its completion have {found['input_ids'].shape[1]} "
                f"tokens, and the model reads {longest}",
                "use a reward model of longer texts, or shorter completions",
            )
        with torch.inference_mode():
            return float(self._model(**found).logits[0, 0])

    def close(self) -> None:
        pass

    def _refusal(self, what: str, remedy: str) -> RewardError:
        return RewardError(what, where=self._where, remedy=remedy)
