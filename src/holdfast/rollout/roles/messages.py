"""Messages of the queue of completions: trainers ask, actors and scorers work.

A trainer says which completions it needs next. Actors and scorers take leases, and hand in what
they made. The queue lives in the coordinator's agent. Another agent answers where that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from holdfast.core.json_parsing import JsonMessage, JsonRow, Key
from holdfast.rollout.messages import Completion, CompletionKey, Finish, ScoredCompletion

ASK_PATH = "/rollout/ask"
WORK_PATH = "/rollout/work"
LOST_PATH = "/rollout/lost"
WEIGHTS_PATH = "/rollout/weights"

Role = Literal["actor", "scorer"]

LEASE_S = 5.0
"""Seconds after its last sign of life for which a role keeps its leases."""
BEAT_S = 1.0
"""Seconds between two signs of life."""


@dataclass(frozen=True)
class Wanted(JsonRow):
    """One completion that a step trains on."""

    step: int  # that trains on it
    tag: str  # of the policy: its content
    policy: int
    epoch: int
    prompt: int
    sample: int

    @property
    def key(self) -> CompletionKey:
        return CompletionKey(self.policy, self.epoch, self.prompt, self.sample)


@dataclass(frozen=True)
class Made(JsonRow):
    """What an actor made of a `Wanted`."""

    wanted: Wanted
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    finish: str
    side: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """What the objective needs of each token, by side tensor: reference, old_values"""

    @property
    def completion(self) -> Completion:
        finish: Finish = "stop" if self.finish == "stop" else "length"
        return Completion(self.wanted.key, self.tokens, self.logps, finish, self.side)

    @staticmethod
    def of(
        wanted: Wanted, completion: Completion, side: Mapping[str, tuple[float, ...]] | None = None
    ) -> Made:
        made = completion.tokens, completion.logps, completion.finish
        return Made(wanted, *made, dict(side or {}))


@dataclass(frozen=True)
class Part(JsonRow):
    """The first tokens of a `Wanted`, from which any actor can continue."""

    wanted: Wanted
    tokens: tuple[int, ...]
    logps: tuple[float, ...]


@dataclass(frozen=True)
class Scored(JsonRow):
    """What a scorer made of a `Made`."""

    made: Made
    text: str
    rewards: tuple[float, ...]

    @property
    def scored_completion(self) -> ScoredCompletion:
        return ScoredCompletion(self.made.completion, self.text, self.rewards)


@dataclass(frozen=True)
class PolicyPart(JsonRow):
    """One file of a policy's weights that an agent serves."""

    policy: int
    tag: str
    part: int  # from 0
    parts: int  # how many files make the policy
    agent: str  # "host:port" of the agent on whose node the file lies


@dataclass(frozen=True)
class TrainerAsk(JsonMessage):
    """What a rank needs for its next steps, in the order of need."""

    rank: int
    step: int  # the step that is trained now: nothing older is needed
    wanted: tuple[Wanted, ...]
    policies: tuple[PolicyPart, ...]  # that lie on its node
    wait: float  # seconds until an answer without news


@dataclass(frozen=True)
class TrainerReply(JsonMessage):
    """The completions of an ask that are ready."""

    absent_if_default = frozenset({"moved", "failure"})
    scored: tuple[Scored, ...] = ()
    actors: int = 0  # that have been heard lately
    scorers: int = 0
    failure: str = ""  # why a completion cannot be rated; the user must act
    moved: str = ""  # the queue is at this address, or "?": not known


@dataclass(frozen=True)
class RoleReport(JsonMessage):
    """A sign of life of an actor or a scorer: what it has done, and what it could do."""

    absent_if_default = frozenset({"made", "scored", "failure", "stands_in", "begun"})
    role: str  # `Role`
    name: str
    queue: str  # the queue that it knows; another one has lost what was handed in
    node: str
    has_free: Annotated[int, Key("free")]  # leases that it could take
    busy: tuple[Wanted, ...]  # leases that it works on
    made: tuple[Made, ...] = ()
    scored: tuple[Scored, ...] = ()
    failure: str = ""  # why a completion cannot be rated
    wait: float = 0.0  # seconds until an answer without news
    stands_in: bool = False  # a trainer does the work of a role that is missing
    begun: tuple[Part, ...] = ()  # of leases: another actor continues from them


@dataclass(frozen=True)
class RoleOrders(JsonMessage):
    """Leases for an actor or a scorer."""

    absent_if_default = frozenset({"moved", "begun"})
    queue: str = ""
    step: int = 0  # results of older steps are needed no more
    wanted: tuple[Wanted, ...] = ()  # to generate
    made: tuple[Made, ...] = ()  # to rate
    policies: tuple[PolicyPart, ...] = ()  # where the policies of `wanted` lie
    begun: tuple[Part, ...] = ()  # of `wanted`: what an actor had that was lost
    moved: str = ""  # as in `TrainerReply`


@dataclass(frozen=True)
class RoleLost(JsonMessage):
    """An actor or a scorer has exited, says the process that started it."""

    absent_if_default = frozenset({"tokens"})

    name: str
    node: str
    exit_code: int  # below 0: the signal that killed it
    tokens: int | None = None  # that it drew and had not handed in; None: not known


@dataclass(frozen=True)
class Done(JsonMessage):
    """The request was done."""

    absent_if_default = frozenset({"moved"})
    moved: str = ""  # as in `TrainerReply`


@dataclass(frozen=True)
class WeightsAsk(JsonMessage):
    """A piece of a file of a policy's weights."""

    policy_tag: str
    policy: int
    part: int
    parts: int
    offset: int
    length: int


@dataclass(frozen=True)
class WeightsPiece(JsonMessage):
    """Bytes of it; `total` -1: this node does not have the file."""

    total: int
    data: bytes
