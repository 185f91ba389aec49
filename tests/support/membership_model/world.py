"""Parts of a world of three agents, for `model.py`: immutable values that are numbered."""

from __future__ import annotations

from itertools import combinations
from typing import Any, NamedTuple

from holdfast.policy.membership.election import AgentState
from holdfast.policy.membership.transitions import CoordinatorState, NodeStage

NAMES = ("a", "b", "c")
PAIRS = tuple(combinations(range(3), 2))
PAIR = {pair: 1 << n for n, pair in enumerate(PAIRS)} | {
    (k, i): 1 << n for n, (i, k) in enumerate(PAIRS)
}


class ViolationError(AssertionError):
    """A state that must not be."""


class Answer(NamedTuple):
    term: int
    order: str
    generation: int = 0
    members: tuple[str, ...] = ()


class Request(NamedTuple):
    to: int
    join: bool
    name: str
    mark: int
    term: int
    at: int
    stage: NodeStage
    parted: str = ""


class Agent(NamedTuple):
    """known: its coordinator has taken it in. answer: under way to it. pending: the object that it
    is about to create, having checked that it may. parted: the node that its workers could not
    reach in the generation that it holds."""

    up: bool
    mark: int
    seat: AgentState
    reign: CoordinatorState | None = None
    stage: NodeStage = NodeStage.IDLE
    known: bool = False
    answer: Answer | None = None
    pending: tuple[int, frozenset[str]] | None = None
    parted: str = ""

    @property
    def address(self) -> str:
        return f"{self.seat.name}{self.mark}"


class Store(NamedTuple):
    """holder: address of the newest term's. generations: of each, address of every member."""

    term: int = 0
    holder: str = ""
    generations: tuple[frozenset[str], ...] = ()


class World(NamedTuple):
    """Numbers of values in `Model`; cuts: bits of PAIRS; asleep: of agents that are stopped."""

    store: int
    agents: tuple[int, int, int]
    cuts: int = 0
    asleep: int = 0
    outage: bool = False
    late: Request | None = None
    faults: int = 0
    lates: int = 0


class Step(NamedTuple):
    label: tuple[Any, ...]
    world: World
    outside: bool = False  # the surroundings did it: a fault, or the end of one


class Numbered:
    """Values of one kind, numbered."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number


def put(world: World, i: int, agent: int) -> World:
    a, b, c = world.agents
    agents = (agent, b, c) if i == 0 else (a, agent, c) if i == 1 else (a, b, agent)
    return World(world.store, agents, *world[2:])
