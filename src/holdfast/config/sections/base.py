"""The base of every section of the run file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen, typed part of the run file. Unknown keys are refused; the loader names the line.

    The description of a key is that of its `Field`, or the docstring below the key.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, validate_default=True, allow_inf_nan=False
    )
