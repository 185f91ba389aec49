"""The functions of an agent that its run controller uses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from holdfast.policy.membership.node_identity import NodeIdentity


@dataclass(frozen=True)
class AgentHooks:
    """Functions of the agent that the run controller uses.

    rendezvous_address: the rendezvous address of a generation's workers. ensure_mover: makes sure
    that a mover runs, which chooses the restore point. on_generation_created: receives the number
    of each generation whose object was made. newest_generation: returns the newest generation known
    here. stop_reason: returns why all of the run must stop, "" while it continues. committed_step:
    returns the newest committed step. on_restored: receives the step of each durable checkpoint
    that a generation begins from. has_stepped: returns whether this session has done a step.
    identity: returns what of this node decides the bits that it computes; None: not known.
    give_up_lead: ends this agent's coordinator, whose term was closed."""

    rendezvous_address: str
    ensure_mover: Callable[[], Awaitable[None]]
    on_generation_created: Callable[[int], None]
    newest_generation: Callable[[], int]
    stop_reason: Callable[[], str]
    committed_step: Callable[[], int]
    on_restored: Callable[[int], None]
    has_stepped: Callable[[], bool] = lambda: True
    identity: Callable[[], NodeIdentity | None] = lambda: None
    give_up_lead: Callable[[], None] = lambda: None
