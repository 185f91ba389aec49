"""What a change of a key does to a run that has begun. Each key of the run file declares it.

    steps: InPlace[int] = Field(1000, ...)       the same run continues with another value
    learning_rate: Branch[float] = Field(...)    a new run continues from a checkpoint of this one
    seed: Never[int] = Field(1, ...)             no checkpoint of this run fits another value

A key without a class of its own has the class of the section that it lies in. The table in
`docs/reference/run-file.md`, the check when a run resumes and `holdfast branch` all ask
`change_of`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeVar


class Change(StrEnum):
    IN_PLACE = "in place"
    BRANCH = "branch"
    NEVER = "never"


T = TypeVar("T")
InPlace = Annotated[T, Change.IN_PLACE]
Branch = Annotated[T, Change.BRANCH]
Never = Annotated[T, Change.NEVER]
