"""What a stage says of one document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The document after a stage."""

    text: str  # as the stage leaves it
    rule: str = ""  # why the document is left out; "" if it stays
    edits: tuple[tuple[str, int], ...] = ()  # (what was changed, how often)
    score: float | None = None  # the number that the rule judges by, if it has one


Stage = Callable[[str], Verdict]
"""A pure function of a document: the same text gives the same verdict on every machine."""
