"""The request of `holdfast profile` to the agents whose ranks are to be profiled."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.json_parsing import JsonMessage

PROFILE_PATH = "/profile"


@dataclass(frozen=True)
class ProfileRequest(JsonMessage):
    """A profile of a running job: of the next steps, on these ranks."""

    required = frozenset({"number", "steps", "ranks"})
    number: int = 0  # tells requests apart; a newer one has a higher number
    steps: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class ProfileReply(JsonMessage):
    """The ranks of this agent that do it."""

    ranks: tuple[int, ...] = ()
