"""What passes between the roles of a run that generates its own training data.

A trainer asks for completions, an actor generates them, a scorer rates them. A completion is a pure
function of the policy's weights, the prompt and its `CompletionKey`. So every process makes
the same bits, and one that is lost is made again by another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from holdfast.core.seeds import key_seed

Finish = Literal["stop", "length"]
"""Why a completion ended: an end token, or `Sampling.max_tokens`."""


@dataclass(frozen=True, order=True)
class CompletionKey:
    """The name of one completion. Its randomness follows from this and the run's seed alone."""

    policy: int  # the step whose weights generate it; 0: the initial weights
    epoch: int  # pass over the prompts, from 0
    prompt: int  # number of the prompt in its file, from 0
    sample: int  # which of the group's completions, from 0

    def seed(self, run_seed: int, index: int) -> int:
        """The seed of the draw of token `index` (from 0) of this completion."""
        name = self.policy, self.epoch, self.prompt, self.sample, index
        return key_seed(run_seed, "completion", *name)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The log-probabilities of a completion are those at `temperature`, or at
    1 if that is 0. They leave `top_p` out."""

    max_tokens: int  # of a completion, its end token included
    temperature: float = 1.0  # 0: the likeliest token
    top_p: float = 1.0
    stop: tuple[int, ...] = ()  # end tokens; the one that was drawn is part of the completion


@dataclass(frozen=True)
class CompletionRequest:
    """One completion to generate."""

    key: CompletionKey
    prompt: tuple[int, ...]  # token ids
    sampling: Sampling


@dataclass(frozen=True)
class Begun:
    """The first tokens of a completion that is under way."""

    key: CompletionKey
    tokens: tuple[int, ...]
    logps: tuple[float, ...]


@dataclass(frozen=True)
class Completion:
    """What an actor generated."""

    key: CompletionKey
    tokens: tuple[int, ...]  # without the prompt, with the end token if one was drawn
    logps: tuple[float, ...]  # natural log of each token's probability, float32; see `Sampling`
    finish: Finish
    # float32 numbers of each token that actors read with the completion: reference, old_values
    side: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class ScoredCompletion:
    """A completion with what its rewards gave."""

    completion: Completion
    text: str  # as the scorer read it, without end tokens
    rewards: tuple[float, ...]  # in the order of `rollout.rewards`, before weights
