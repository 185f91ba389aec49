"""Prompts, tokenizer and rewards of a run, as every role opens them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from holdfast.config.run import RunConfig
from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.rewards import PromptsConfig, RewardConfig
from holdfast.data.read.vocabulary import load_tokenizer, stop_tokens, tokenizer_file
from holdfast.rollout.messages import CompletionRequest, Sampling
from holdfast.rollout.prompts import Prompts, read_prompts
from holdfast.rollout.rewards.rewards import Rewards
from holdfast.rollout.roles.messages import Wanted

TOKENIZER_PLACE = "tokenizer"


def places_of(config: RunConfig) -> dict[str, str]:
    """Return where the files lie that the run file names, for `rollout.places`."""
    rollout, found = config.rollout, dict[str, str]()
    for number, entry in enumerate(rollout.prompts):
        found[f"prompts.{number}"] = str(Path(entry.place).absolute())
    for number, reward in enumerate(rollout.rewards):
        if reward.path:
            found[f"rewards.{number}"] = str(Path(reward.place).absolute())
    if config.data.tokenizer.place:
        found[TOKENIZER_PLACE] = str(tokenizer_file(config.data.tokenizer.place).absolute())
    return found


def _located(config: RunConfig) -> tuple[list[PromptsConfig], list[RewardConfig], DataConfig]:
    """The sections with the places of their files, which the run file's values lack."""
    places, rollout = config.rollout.places, config.rollout
    prompts = [p.at(places.get(f"prompts.{n}", p.place)) for n, p in enumerate(rollout.prompts)]
    rewards = [r.at(places.get(f"rewards.{n}", r.place)) for n, r in enumerate(rollout.rewards)]
    tokenizer = config.data.tokenizer
    tokenizer = tokenizer.at(places.get(TOKENIZER_PLACE, tokenizer.place))
    return prompts, rewards, config.data.model_copy(update={"tokenizer": tokenizer})


def open_prompts(config: RunConfig) -> Prompts:
    """Read all prompts. Raises DataError."""
    prompts, _, data = _located(config)
    return read_prompts(prompts, data, config.rollout.source_column)


def open_rewards(config: RunConfig) -> Rewards:
    """Open what rates completions. Raises RewardError."""
    _, rewards, _ = _located(config)
    return Rewards(rewards, config.task.folder)


@dataclass(frozen=True)
class Texts:
    """What turns a `Wanted` into a request, and tokens into text."""

    prompts: Prompts
    tokenizer: Tokenizer
    sampling: Sampling

    @staticmethod
    def open(config: RunConfig) -> Texts:
        """Raises DataError."""
        _, _, data = _located(config)
        prompts = open_prompts(config)
        path = tokenizer_file(str(data.tokenizer.place))
        tokenizer = load_tokenizer(path)
        rollout = config.rollout
        stop = tuple(sorted(stop_tokens(tokenizer, path).values()))
        sampling = Sampling(rollout.max_tokens, rollout.temperature, rollout.top_p, stop)
        return Texts(prompts, tokenizer, sampling)

    def request(self, wanted: Wanted) -> CompletionRequest:
        return CompletionRequest(wanted.key, self.prompts[wanted.prompt].ids, self.sampling)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion without its end token."""
        plain = tokens[:-1] if tokens and tokens[-1] in self.sampling.stop else tokens
        return str(self.tokenizer.decode(list(plain), skip_special_tokens=True))
