"""Decides when to save. Pure: steps and seconds are arguments.

Every rank must come to the same answer at the same step. All ranks know the steps, but their clocks
differ. So only one rank evaluates a rule by seconds. Its answer reaches the other ranks with the
vote of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SaveReason = Literal["end", "stop", "steps", "seconds"]


def why_save_now(
    step: int,
    steps: int,
    *,
    every_steps: int,
    every_seconds: float = 0.0,
    seconds_since_save: float = 0.0,
    is_stopping: bool = False,
    last_saved: int = 0,
) -> SaveReason | None:
    """Return why the state after `step` (of `steps`) is to be saved now; None: it is not.

    `last_saved` is the step of the newest capture: nothing is saved twice. 0 switches a rule off.
    """
    if step <= last_saved:
        return None
    if step >= steps:
        return "end"
    if is_stopping:
        return "stop"
    if every_steps and step % every_steps == 0:
        return "steps"
    if every_seconds and seconds_since_save >= every_seconds:
        return "seconds"
    return None


@dataclass(frozen=True)
class SaveDestinations:
    """Destinations of a snapshot beyond its node's memory."""

    is_durable: bool
    to_peers: bool | None = None  # None: as their rule by steps says
    to_bucket: bool = True  # a durable one also goes into the bucket, if there is one


DURABLE = SaveDestinations(is_durable=True)
"""A durable save: to peers as their rule by steps says, and into the bucket."""
