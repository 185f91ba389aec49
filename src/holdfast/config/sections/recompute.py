"""What a block keeps for its backward pass: the words of `train.recompute` and its neighbours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.errors import nearest_of

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)

KeptOperation = Literal["matmul", "attention", "activation"]
"""Operations whose results `selective` may keep. matmul: products with weights (torchtitan's `mm`).
attention: its fused kernel (Megatron's `core_attn`). activation: that of the feed-forward."""

DEFAULT_KEPT: tuple[KeptOperation, ...] = ("matmul",)


@dataclass(frozen=True)
class RecomputePolicy:
    """What the blocks of one stage keep. input_parts: ranks over which the input of a block is
    cut."""

    word: Recompute = "none"
    keep: tuple[KeptOperation, ...] = DEFAULT_KEPT
    input_parts: int = 1

    def keeps(self, operation: KeptOperation) -> bool:
        """Whether results of this operation are kept, of those that are run again otherwise."""
        return self.word == "selective" and operation in self.keep

    def __str__(self) -> str:
        words: list[str] = [self.word]
        if self.word == "selective":
            words.append(f"keeps {' and '.join(self.keep)}")
        if self.input_parts > 1:
            words.append(f"inputs of blocks cut over tp {self.input_parts}")
        return ", ".join(words)


def check_words(value: object) -> object:
    """Raises ValueError for what is neither a word of `train.recompute` nor a list of some."""
    items = value if isinstance(value, list | tuple) else [value]
    if not items:
        raise ValueError("a list has a word for each stage of the pipeline: use none")
    for item in items:
        if item not in RECOMPUTE:
            shown = repr(item) if isinstance(item, str) else json.dumps(item, default=str)
            raise ValueError(
                f"{shown} is none of {', '.join(RECOMPUTE)}: "
                f"use {nearest_of(str(item), RECOMPUTE) or 'none'}"
            )
    return value


def word_of_stage(words: Recompute | Sequence[Recompute], stage: int, stages: int) -> Recompute:
    """The word of one stage of a pipeline.

    A list has a word for each stage of the run file's pipeline. After a loss a pipeline may have
    other stages. Such a stage takes the word that keeps least, of those whose blocks it has.
    """
    if isinstance(words, str):
        return words
    first, end = stage * len(words) // stages, -(-(stage + 1) * len(words) // stages)
    return max(words[first:end], key=RECOMPUTE.index)
