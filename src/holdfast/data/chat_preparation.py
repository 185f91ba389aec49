"""The part of a preparation that only chat data needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.config.data import DataConfig
from holdfast.data import vocabulary
from holdfast.data.chat_format import (
    compile_template,
    read_chat_format,
    special_tokens,
    stop_tokens,
)
from holdfast.data.chat_gate import check_masks, describe_left_out
from holdfast.data.chat_templates import TEMPLATE_FILE
from holdfast.data.chat_tokens import ChatCounts
from holdfast.data.dataset import FORMAT
from holdfast.data.files import write_atomic
from holdfast.data.sources import SourcePlan, Unit
from holdfast.data.unit_tasks import SPLITS, read_chat_counts, read_left_out, read_tokens
from holdfast.errors import DataError

PathOf = Callable[[str, Unit], Path]  # (stage, unit) -> its result


class ChatPreparation:
    """Template, stop tokens and masks of a run's chat sources. format: None if it has none.

    Raises DataError if jinja2 is missing, and for a template that is none.
    """

    def __init__(self, config: DataConfig):
        self.format = read_chat_format(config)
        self.stop: dict[str, int] = {}
        if self.format is not None:
            compile_template(self.format)
            path = vocabulary.tokenizer_file(str(config.tokenizer.place))
            self.stop = stop_tokens(vocabulary.load_tokenizer(path), path)

    @property
    def dataset_format(self) -> int:
        """A dataset of texts alone can be read by older programs."""
        return 1 if self.format is None else FORMAT

    def left_out(self, plan: SourcePlan, path_of: PathOf) -> Iterator[str]:
        """A line about the rows that a source leaves out."""
        found: Counter[str] = Counter()
        for unit in plan.units:
            found += read_left_out(path_of("scan", unit))
        if found:
            yield f"{plan.name}: {describe_left_out(found)}"

    def check(
        self, plans: Sequence[SourcePlan], path_of: PathOf, tokenizer_path: Path
    ) -> Iterator[str]:
        """Lines about what carries loss. Raises DataError for a set that teaches nothing, or the
        wrong thing."""
        if self.format is None:
            return
        tokenizer = vocabulary.load_tokenizer(tokenizer_path)
        special = special_tokens(tokenizer).values()
        for plan in plans:
            paths = [path_of("tokens", unit) for unit in plan.units if unit.is_chat]
            if not paths:
                continue
            pieces = (read_tokens(path, split) for split in SPLITS for path in paths)
            first = next((piece for piece in pieces if len(piece.lengths)), None)
            if first is None or first.mask is None:
                raise DataError(
                    "no token of any row carries loss",
                    where=f"source {plan.name!r}",
                    remedy="look at data.chat.train_on, and at the template",
                )
            cut = int(first.lengths[0])
            sample = np.array(first.tokens[:cut]), np.array(first.mask[:cut])
            counts = _sum(paths, SPLITS)
            yield from check_masks(plan.name, counts, sample, tokenizer, self.stop, special)

    def count_targets(
        self,
        split: str,
        plans: Sequence[SourcePlan],
        path_of: PathOf,
        of_text: Callable[[int], tuple[int, int]],
    ) -> dict[str, int]:
        """The tokens of a split that carry loss, and the bytes of text that they stand for. Nothing
        without chat data. of_text(i): both of source i, which is text."""
        if self.format is None:
            return {}
        targets = size = 0
        for index, plan in enumerate(plans):
            paths = [path_of("tokens", unit) for unit in plan.units if unit.is_chat]
            if paths:
                counts = _sum(paths, (split,))
                found = counts.targets, counts.target_bytes
            else:
                found = of_text(index)
            targets, size = targets + found[0], size + found[1]
        return {"targets": targets, "target_bytes": size}

    def store_template(self, folder: Path) -> dict[str, Any]:
        """Write the template next to the tokenizer; returns what the manifest says of it."""
        if self.format is None or not self.format.template:
            return {}
        text = self.format.template.encode()
        digest = write_atomic(folder / TEMPLATE_FILE, [text], sync=True)
        return {"chat": {"template": digest, "variables": dict(self.format.variables)}}


def _sum(paths: Sequence[Path], splits: Sequence[str]) -> ChatCounts:
    total = ChatCounts()
    for path in paths:
        for split in splits:
            total.merge(read_chat_counts(path, split))
    return total
