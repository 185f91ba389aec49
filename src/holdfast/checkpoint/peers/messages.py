"""Requests between movers of different nodes, and their answers. `client` says how they travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.json_parsing import JsonMessage
from holdfast.core.sharding.state_table import StateTable
from holdfast.layout import Topology


@dataclass(frozen=True)
class GenerationPlan(JsonMessage):
    """The writers of a generation, and the tensors that they write."""

    topology: Topology
    table: StateTable


@dataclass(frozen=True)
class Inventory(JsonMessage):
    """What a mover has in memory."""

    snapshots: tuple[str, ...]  # sealed part manifests, newest step first
    plans: Mapping[int, GenerationPlan]  # by generation


@dataclass(frozen=True)
class NewestReply(JsonMessage):
    generation: int  # the newest one that has asked there; 0: none


@dataclass(frozen=True)
class Offer(JsonMessage):
    """A snapshot that the receiver may pull."""

    absent_if_default = frozenset({"plan"})
    part: str  # its sealed part manifest
    run: str  # what is computed (`client.run_identity`)
    source: str  # "host:port" of who offers
    ranks: tuple[int, ...]  # that the offerer sends here, in this generation
    plan: GenerationPlan | None = None  # None: the receiver should know it


@dataclass(frozen=True)
class OfferReply(JsonMessage):
    """What became of an offer."""

    absent_if_default = frozenset({"reused"})
    state: str  # "held", "pulling" (ask again), or "plan" (say who writes)
    reused: int | None = None  # bytes that the receiver had already; only if held
