"""What a plan says of a generation before it trains."""

from __future__ import annotations

from holdfast.events import Event


class StepPredicted(Event, kind="step_predicted"):
    """A generation's plan, written when the generation starts."""

    seconds: float  # of a step
    parts: dict[str, float]  # seconds by what they go to; they add up to `seconds`
    bytes: int  # on the fullest device
    source: str  # of the devices' speeds: "assumed", or "measured 2026-11-26"
