"""The base of the run file's sections, and what a change of a key does to a run that has begun.

    steps: InPlace[int] = Field(1000, ...)       the same run continues with another value
    learning_rate: Branch[float] = Field(...)    a new run continues from a checkpoint of this one
    seed: Never[int] = Field(1, ...)             no checkpoint of this run fits another value

A key without a class of its own has the class of the section that it lies in. The table in
`docs/reference/run-file.md`, the check when a run resumes and `holdfast branch` all ask
`change_of`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator


class Change(StrEnum):
    IN_PLACE = "in place"
    BRANCH = "branch"
    NEVER = "never"


T = TypeVar("T")
InPlace = Annotated[T, Change.IN_PLACE]
Branch = Annotated[T, Change.BRANCH]
Never = Annotated[T, Change.NEVER]


class Section(BaseModel):
    """A frozen, typed part of the run file. Unknown keys are refused; the loader names the line.

    The description of a key is that of its `Field`, or the docstring below the key.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, validate_default=True, allow_inf_nan=False
    )

    def broken_rules(self) -> Iterator[str]:
        """Yield the sentence of each broken rule over several keys, "... : use ...". Only the first
        one is said."""
        return iter(())

    def find_broken_rule(self) -> str | None:
        """Return the first of `broken_rules`; None if there is none."""
        return next(filter(None, self.broken_rules()), None)

    @model_validator(mode="after")
    def _keeps_rules(self) -> Self:
        if (sentence := self.find_broken_rule()) is not None:
            raise ValueError(sentence)
        return self


def check_text(pattern: str, problem: str) -> AfterValidator:
    """Return what refuses a text that is not empty and does not match. problem: what follows the
    text in the sentence, "...: use ..."."""

    def check(text: str) -> str:
        if text and not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} {problem}")
        return text

    return AfterValidator(check)


def check_each(pattern: str | re.Pattern[str], problem: str) -> AfterValidator:
    """Return what refuses a list with a text that does not match. problem: what follows the text in
    the sentence, "...: use ..."."""

    def check(texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            if not re.fullmatch(pattern, text):
                raise ValueError(f"{text!r} {problem}")
        return texts

    return AfterValidator(check)
