"""What the processes of actors and scorers are started with. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.core.json_parsing import JsonMessage

HOST_MODULE = "holdfast.rollout.roles.host"
"""The program that takes a `HostSpec`."""


@dataclass(frozen=True)
class HostSpec(JsonMessage):
    """The line on a host's standard input."""

    config: dict[str, Any]  # the run's, planned
    secret: str  # as `Secret.hex` has it
    agent: str  # "host:port" of the agent that started it; "": it looks into the run store
    run_folder: str
    node: str
    policies: str  # folder of the node's policies; "": no trainer publishes here
    actors: int
    scorers: int
    devices: tuple[str, ...]  # of the actors, in turn
    threads: int  # cores that one of them may compute on
