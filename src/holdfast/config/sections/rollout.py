"""The `rollout` section: a run that generates its own training data from prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from holdfast.config.sections.base import Branch, InPlace, Never, Section
from holdfast.config.sections.rewards import PromptsConfig, RewardConfig, numbered_labels

MAX_LAG = 2


class ServerConfig(Section):
    """A server of the OpenAI protocol, such as vLLM, that generates for the actors."""

    url: InPlace[str] = Field("", description="such as http://host:8000/v1; empty: no server")
    model: InPlace[str] = Field("", description="the base of the run's adapters, as it names it")
    key_variable: InPlace[str] = Field("", pattern=r"^([A-Za-z_]\w*)?$")
    """environment variable with the server's key; empty: it needs none"""
    folder: InPlace[str] = ""
    """where actors write each policy's adapters, and the server reads them; empty: a temporary
    folder of the actor's machine"""


class RolloutConfig(Section):
    """Completions of prompts: how they are drawn, by which processes, and how old the policy is."""

    prompts: Branch[tuple[PromptsConfig, ...]] = ()
    """files of prompts (docs/guide/rewards.md); none: the run trains on a dataset"""
    rewards: Branch[tuple[RewardConfig, ...]] = ()
    """what rates a completion (docs/guide/rewards.md). objective.kind distill: only reported"""
    source_column: Branch[str | None] = None
    """column of prompts with the name of a row's source, by which rewards are reported; left out:
    the name of its entry in prompts"""
    samples: Branch[int] = Field(4, ge=1, le=4096)
    """completions of each prompt: a group. train.batch_size counts completions, and is a multiple
    of it"""
    max_tokens: Branch[int] = Field(64, ge=1, description="tokens of a completion at most")
    temperature: Branch[float] = Field(1.0, ge=0, le=100, description="0: the likeliest token")
    top_p: Branch[float] = Field(1.0, gt=0, le=1)
    """tokens are drawn from the smallest set that reaches this probability"""
    lag: Never[int] = Field(0, ge=0, le=MAX_LAG)
    """steps by which the policy that generates is older than the one that is trained"""
    filter: Branch[Literal["none", "no_variance"]] = "none"
    """no_variance: a group whose completions all have one reward is drawn again"""
    redraws: Branch[int] = Field(1, ge=0, le=16)
    """how often a filtered group is drawn again; after that it counts for nothing"""
    actors: InPlace[int] = Field(1, ge=0, le=1024)
    """processes of each node that generate; 0: the trainers generate"""
    scorers: InPlace[int] = Field(1, ge=0, le=1024)
    """processes of each node that rate completions; 0: the trainers rate them"""
    slots: InPlace[int] = Field(1, ge=1, le=4096)
    """completions that one actor generates at a time"""
    server: ServerConfig = ServerConfig()
    show_every: InPlace[int] = Field(10, ge=0)
    """steps between two groups of completions that the journal and the report show; 0: none"""
    version: Branch[str] = Field("", description="of prompts and tokenizer (planned)")
    rewards_version: InPlace[str] = ""
    """digest of rewards and their files (planned). A run continues with a function that was mended,
    and says so"""
    places: InPlace[dict[str, str]] = Field(default_factory=dict)
    """where the files that prompts, rewards and tokenizer name lie (planned)"""
    sources: InPlace[tuple[str, ...]] = ()
    """names of the sources of prompts, by which rewards are reported, if there are several
    (planned)"""
    count: Branch[int] = Field(0, ge=0, description="number of prompts (planned)")

    @property
    def is_on(self) -> bool:
        """Whether the run generates completions."""
        return bool(self.prompts)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the means of each reward, if there are several."""
        labels = numbered_labels(self.rewards)
        return tuple(f"rewards/{label}/mean" for label in labels) if len(labels) > 1 else ()

    @property
    def draws(self) -> int:
        """How often a group is drawn at most."""
        return 1 + (self.redraws if self.filter != "none" else 0)

    def broken_rules(self) -> Iterator[str]:
        if self.rewards and not self.prompts:
            yield "rollout.rewards has nothing to rate: use rollout.prompts, or remove it"
        if self.server.model and not self.server.url:
            yield "rollout.server.model has no server: use rollout.server.url, or remove it"
        if self.server.url and not (self.server.model and self.actors):
            what = "model" if self.actors else "actors 0"
            yield (
                f"rollout.server.url needs the server's name of the model, and actors that ask it; "
                f"{what} is missing: use rollout.server.model and rollout.actors 1 or more"
            )
        if self.filter != "none" and self.samples == 1:
            yield (
                f"rollout.filter {self.filter} compares the completions of a group, and "
                "rollout.samples is 1: use rollout.samples 2 or more, or filter none"
            )
        if self.is_on and self.filter != "none" and self.temperature == 0:
            yield (
                "rollout.temperature 0 draws the same completion each time, so no group has "
                "variance: use a temperature above 0, or rollout.filter none"
            )
