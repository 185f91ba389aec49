"""The section `pause:` of a run file: hours in which the run waits."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from holdfast.config.sections.base import Section


class PauseConfig(Section):
    """Hours of dirty or dear power, in which the run saves, ends its workers and waits
    ([energy.md](../studies/energy.md#pauses-of-a-run))."""

    file: str = ""
    """CSV file, of times and values such as grams of CO2 a kWh. It is read again when
    it changes; empty: the run never waits"""
    column: str = ""
    """column of its values; empty: the only one"""
    above: float | None = Field(None, allow_inf_nan=False)
    """value above which the run waits"""
    below: float | None = Field(None, allow_inf_nan=False)
    """value at which it continues; none: that of above"""
    max_hours: float = Field(12, gt=0, allow_inf_nan=False)
    """hours of one pause; after it the run does not wait until the value was at most below"""

    def broken_rules(self) -> Iterator[str]:
        if self.above is not None and self.below is not None and self.below > self.above:
            yield f"below {self.below:g} is more than above {self.above:g}; use {self.above:g}"
