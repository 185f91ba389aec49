"""Messages between a worker and its agent."""

from __future__ import annotations

STEP_PHASES = ("compute", "reduce", "vote")
"""Phases of a step; the time between two steps may be long."""


MAX_POLL_WAIT_S = 20.0
"""Seconds after which an unfinished wait is answered, so that no connection looks dead."""
