"""The base of every section of the run file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen, typed part of the run file. Unknown keys are refused; the loader names the line."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, validate_default=True, allow_inf_nan=False
    )
