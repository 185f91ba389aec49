"""The part of a preparation that only chat data needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.config.sections.data import DataConfig
from holdfast.data.read import vocabulary
from holdfast.data.read.chat_borders import MARGIN, ChatNotes
from holdfast.data.read.chat_format import compile_templates, read_chat_format, special_tokens
from holdfast.data.read.chat_templates import TEMPLATE_FILE, joined
from holdfast.data.read.files import write_atomic
from holdfast.data.read.sources import SourcePlan, Unit
from holdfast.data.stages.chat_gate import ShownDocument, check_masks, titles
from holdfast.data.stages.chat_tokens import ChatCounts
from holdfast.data.stages.scan_tasks import read_notes
from holdfast.data.stages.unit_tasks import SPLITS, read_chat_counts, read_tokens
from holdfast.data.stream.dataset import (
    FORMAT,
    FORMAT_OF_PREFERENCES,
    FORMAT_OF_SCORES,
    FORMAT_OF_STAGES,
    FORMAT_OF_WEIGHTS,
)
from holdfast.errors import DataError

PathOf = Callable[[str, Unit], Path]  # (stage, unit) -> its result


@dataclass(frozen=True)
class SourceSize:
    """One source and split. text_tokens: without begin and end tokens. bytes: of its documents."""

    documents: int
    tokens: int
    text_tokens: int
    bytes: int


class ChatPreparation:
    """Template, stop tokens and masks of a run's chat sources. format: None if it has none.

    Raises DataError if jinja2 is missing, and for a template that is none.
    """

    def __init__(self, config: DataConfig):
        self.format = read_chat_format(config)
        self.has_preferences, self.has_stages = config.has_preferences, bool(config.stages)
        self.has_features = config.features.is_on
        self.has_scores = any(stage.kind == "score" for stage in config.stages)
        self.stop: dict[str, int] = {}
        if self.format is not None:
            compile_templates(self.format, config.chat.template_kwargs)
            path = vocabulary.tokenizer_file(str(config.tokenizer.place))
            self.stop = vocabulary.stop_tokens(vocabulary.load_tokenizer(path), path)

    @property
    def dataset_format(self) -> int:
        """A dataset of texts without stages, or without weights, can be read by older programs."""
        if self.has_features:
            return FORMAT
        if self.format is None:
            return (
                (FORMAT_OF_SCORES if self.has_scores else FORMAT_OF_STAGES)
                if self.has_stages
                else 1
            )
        if self.has_preferences:
            return FORMAT_OF_PREFERENCES
        return FORMAT_OF_WEIGHTS if self.format.weights else FORMAT_OF_WEIGHTS - 1

    def notes(self, plan: SourcePlan, path_of: PathOf) -> Iterator[str]:
        """Lines about what the rows of a source say that is not trained on."""
        notes = ChatNotes()
        for unit in plan.units:
            notes.merge(read_notes(path_of("scan", unit)))
        margins = notes.seen.get(MARGIN, {})
        if len(margins) > 1:
            (given, _), (missing, where) = margins["given"], margins["missing"]
            raise DataError(
                f"{missing:,} pairs have no margin, and {given:,} have one",
                where=f"source {plan.name!r}: {where}",
                remedy="give each pair of a source one, or none",
            )
        for line in notes.lines():
            yield f"{plan.name}: {line}"

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
            named = titles(
                plan.units[0].rows, [] if first.values is None else first.values.tolist()
            )
            row, _ = first.cut(len(named))
            assert row.mask is not None
            ends = np.cumsum(row.lengths)[:-1]
            parts = zip(np.split(row.tokens, ends), np.split(row.mask, ends), named, strict=True)
            sample = [ShownDocument(np.array(i), np.array(m), title) for i, m, title in parts]
            counts = _sum(paths, SPLITS)
            yield from check_masks(plan.name, counts, sample, tokenizer, self.stop, special)

    def split_counts(
        self, sizes: dict[str, list[SourceSize]], plans: Sequence[SourcePlan], path_of: PathOf
    ) -> dict[str, dict[str, int]]:
        """What the manifest says of each split. With chat data also the tokens that carry loss,
        and the bytes of text that they stand for."""
        out = {}
        for split, found in sizes.items():
            out[split] = {
                "documents": sum(one.documents for one in found),
                "tokens": sum(one.tokens for one in found),
                "bytes": sum(one.bytes for one in found),
            }
            if self.format is not None:
                targets = [
                    self._targets(split, plan, one, path_of)
                    for plan, one in zip(plans, found, strict=True)
                ]
                out[split]["targets"] = sum(count for count, _ in targets)
                out[split]["target_bytes"] = sum(size for _, size in targets)
        return out

    def _targets(
        self, split: str, plan: SourcePlan, size: SourceSize, path_of: PathOf
    ) -> tuple[int, int]:
        paths = [path_of("tokens", unit) for unit in plan.units if unit.is_chat]
        if not paths:
            return size.text_tokens, size.bytes
        counts = _sum(paths, (split,))
        return counts.targets, counts.target_bytes

    def store_template(self, folder: Path) -> dict[str, Any]:
        """Write the template next to the tokenizer; returns what the manifest says of it."""
        if self.format is None or not self.format.template:
            return {}
        text = self.format.template
        if self.format.tool_template:
            text = joined(text, self.format.tool_template)
        digest = write_atomic(folder / TEMPLATE_FILE, [text.encode()], sync=True)
        return {"chat": {"template": digest, "variables": dict(self.format.variables)}}


def _sum(paths: Sequence[Path], splits: Sequence[str]) -> ChatCounts:
    total = ChatCounts()
    for path in paths:
        for split in splits:
            total.merge(read_chat_counts(path, split))
    return total
