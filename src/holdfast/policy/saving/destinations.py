"""When to save. Pure: steps and seconds come in as arguments.

Every rank must come to the same answer at the same step. Steps are common knowledge; seconds are
not, so a rule by seconds is asked on one rank only, and its answer travels to the others with the
vote of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal["end", "stop", "steps", "seconds"]


def due(
    step: int,
    steps: int,
    *,
    every_steps: int,
    every_seconds: float = 0.0,
    seconds_since_save: float = 0.0,
    stopping: bool = False,
    last_saved: int = 0,
) -> Reason | None:
    """Why the state after `step` (of `steps`) is to be saved now; None: it is not.

    `last_saved` is the step of the newest capture: nothing is saved twice. 0 switches a rule off.
    """
    if step <= last_saved:
        return None
    if step >= steps:
        return "end"
    if stopping:
        return "stop"
    if every_steps and step % every_steps == 0:
        return "steps"
    if every_seconds and seconds_since_save >= every_seconds:
        return "seconds"
    return None


@dataclass(frozen=True)
class Into:
    """Where a snapshot goes from its node's memory. copied: to peers; None: as their rule by steps
    says. uploaded: what is durable, into the bucket, where there is one."""

    durable: bool
    copied: bool | None = None
    uploaded: bool = True
