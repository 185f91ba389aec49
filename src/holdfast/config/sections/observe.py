"""The section `observe`: alerts of a run, and the objectives that some of them come from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from holdfast.config.sections.base import InPlace, Section

FROM_ENVIRONMENT = "environment"
WEBHOOK_VARIABLE = "HOLDFAST_WEBHOOK_URL"
TOKEN_VARIABLE = "HOLDFAST_WEBHOOK_TOKEN"
_HOUR_S, _DAY_S = 3600.0, 86400.0


class ServiceObjective(Section):
    """A share of time that a run is to keep, over a period."""

    indicator: Literal["goodput", "progress"] = "goodput"
    """goodput: seconds that compute steps that count. progress: all seconds but those of starts,
    recoveries and repeated steps"""
    target: float = Field(0.9, ge=0.5, le=0.99, description="share of time, from 0.5 to 0.99")
    period: str = Field("7d", pattern=r"^[1-9][0-9]{0,3}[hd]$")
    """over which the share is taken, in hours or days: 6h, 7d"""

    @property
    def period_s(self) -> float:
        return int(self.period[:-1]) * (_HOUR_S if self.period.endswith("h") else _DAY_S)

    @property
    def text(self) -> str:
        """The objective in a few words."""
        return f"{self.indicator} {100 * self.target:g} % over {self.period}"


class ObserveConfig(Section):
    """Alerts and objectives ([observe.md](../guide/observe.md))."""

    webhook: InPlace[str] = ""
    """address that gets the run's alerts in Alertmanager's format; environment: the address in
    HOLDFAST_WEBHOOK_URL; empty: none. HOLDFAST_WEBHOOK_TOKEN is sent as a bearer token"""
    every_seconds: InPlace[float] = Field(15.0, gt=0)
    """seconds between two evaluations of the alerts that the webhook gets"""
    objectives: InPlace[tuple[ServiceObjective, ...]] = ()
    """shares of time that alerts of burn rates come from"""

    @field_validator("webhook")
    @classmethod
    def _is_an_address(cls, text: str) -> str:
        if text and text != FROM_ENVIRONMENT and not text.startswith(("http://", "https://")):
            raise ValueError(f"{text!r} is no address of a webhook: use https://HOST/PATH")
        if "@" in text.partition("://")[2].partition("/")[0]:
            raise ValueError(
                "the address has a user or a password, and a run file is no place for it: use "
                f"environment, and {WEBHOOK_VARIABLE}"
            )
        return text
