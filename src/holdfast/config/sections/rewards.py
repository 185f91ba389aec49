"""Entries of `rollout.prompts` and `rollout.rewards`: what is asked, and what rates the replies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from holdfast.config.sections.base import Section

KEYS_OF_KIND: dict[str, frozenset[str]] = {
    "exact_match": frozenset(("pattern", "ignore_case")),
    "regex": frozenset(("pattern", "ignore_case")),
    "function": frozenset(("function", "timeout_s", "on_timeout")),
    "code": frozenset(("tests", "timeout_s", "on_timeout", "memory_mb", "isolation")),
    "model": frozenset(("path",)),
}
"""Kind of a reward -> its keys, in addition to kind, name and weight."""
_NEEDED = {"regex": "pattern", "function": "function", "model": "path"}


class PromptsConfig(Section):
    """Files of prompts, one JSON object a line."""

    path: str
    """file, folder or glob of JSON lines"""
    name: str | None = None
    """name in metrics; the file's name if left out"""
    prompt: str = "prompt"
    """column of the prompt: a text, or a list of messages"""
    answer: str = "answer"
    """column of the answer that rewards compare with"""
    _place: str | None = PrivateAttr(None)

    @property
    def place(self) -> str:
        """The place of `path`; the path itself without a run file."""
        return self._place or self.path

    def at(self, place: str | None) -> PromptsConfig:
        located = self.model_copy()
        located._place = place
        return located


def numbered_labels(entries: Sequence[RewardConfig]) -> tuple[str, ...]:
    """A name of each entry for metrics; a repeated one gets a number."""
    names = [entry.label for entry in entries]
    return tuple(
        name if names.count(name) == 1 else f"{name}_{names[:place].count(name) + 1}"
        for place, name in enumerate(names)
    )


class RewardConfig(Section):
    """What rates a completion: docs/guide/rewards.md."""

    kind: Literal["exact_match", "regex", "function", "code", "model"]
    """what gives the number"""
    name: str | None = None
    """name in metrics; the kind, or the function's, if left out"""
    weight: float = 1.0
    """the reward is the sum of weight times number over all entries"""
    pattern: str | None = None
    """exact_match: the last match is compared, or its first group; regex: what must match"""
    ignore_case: bool = False
    """capital letters do not count"""
    function: str | None = None
    """module:name of a function, in task.folder or installed"""
    tests: str | None = None
    """code: column with Python that is run after the program; none: its output is compared"""
    path: str | None = None
    """model: folder of a sequence classifier"""
    timeout_s: float = Field(10.0, gt=0)
    """function: wall seconds of a call; code: processor seconds"""
    on_timeout: float | None = None
    """number of a completion that takes longer; none: it ends the run"""
    memory_mb: int = Field(1024, ge=64)
    """code: memory of a program"""
    isolation: Literal["full", "limits"] = "full"
    """code: full: no network, no other files or processes; limits: time and memory alone"""
    _place: str | None = PrivateAttr(None)

    @property
    def place(self) -> str:
        """The place of `path`; the path itself without a run file."""
        return self._place or self.path or ""

    def at(self, place: str | None) -> RewardConfig:
        located = self.model_copy()
        located._place = place
        return located

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return self.name or (self.function or self.kind).rpartition(":")[2]

    def broken_rules(self) -> Iterator[str]:
        used = KEYS_OF_KIND[self.kind] | {"kind", "name", "weight"}
        for key, field in type(self).model_fields.items():
            value: Any = getattr(self, key)
            if key not in used and value != field.default:
                kinds = " or ".join(kind for kind, keys in KEYS_OF_KIND.items() if key in keys)
                yield f"{key} has no effect with kind: {self.kind}: use kind: {kinds}"
        needed = _NEEDED.get(self.kind)
        if needed is not None and not getattr(self, needed):
            yield f"{needed} is missing for kind: {self.kind}: use {needed}"
        if self.kind == "code" and self.on_timeout is None:
            yield "kind: code runs programs that may never end: use on_timeout: 0"
        if self.function is not None and not re.fullmatch(r"[\w.]+:\w+", self.function):
            yield f"function {self.function!r} is no module:name: use the form my_rewards:score"
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                yield f"pattern {self.pattern!r} is no regular expression ({error}): use another"
