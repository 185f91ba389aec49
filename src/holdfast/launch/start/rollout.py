"""What a start works out of the prompts and rewards of a run that generates its data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.data.read.vocabulary import describe_tokenizer, load_tokenizer, needed_size
from holdfast.errors import ConfigError, DataError
from holdfast.rollout.decode.server import check_server
from holdfast.rollout.decode.server_link import ServerAddress
from holdfast.rollout.messages import Sampling
from holdfast.rollout.roles.texts import TOKENIZER_PLACE, open_prompts, open_rewards, places_of

MAX_SOURCES = 64
"""Sources of prompts: a step carries two numbers for each."""


def plan_rollout(loaded: LoadedConfig) -> PlannedValues:
    """Read the prompts, try the rewards, and return the planned keys. Raises UserError."""
    folder = os.path.abspath(loaded.config.task.folder or loaded.base or ".")
    loaded = loaded.with_values({"task.folder": (folder, "the run file's folder")})
    config = loaded.config
    prompts = open_prompts(config)
    rollout, length = config.rollout, config.data.sequence_length
    room = length + 1 - rollout.max_tokens
    if longest := [prompt for prompt in prompts if len(prompt.ids) > room]:
        first = longest[0]
        raise DataError(
            f"the prompt has {len(first.ids)} tokens, and with completions of "
            f"{rollout.max_tokens} there is room for {room}",
            where=first.where,
            remedy=f"use data.sequence_length={len(first.ids) + rollout.max_tokens - 1} or more, "
            "or a smaller rollout.max_tokens",
        )
    with open_rewards(config) as rewards:
        rewards.check(prompts)
        judged = rewards.version
    if len(sources := prompts.sources) > MAX_SOURCES:
        raise ConfigError(
            f"the prompts have {len(sources):,} sources, and a step reports at most {MAX_SOURCES}",
            where=loaded.where("rollout.prompts"),
            remedy="set rollout.source_column to a column with fewer values, or leave it out",
        )
    places = places_of(config)
    path = Path(places[TOKENIZER_PLACE])
    tokens = describe_tokenizer(load_tokenizer(path), path)
    if (server := rollout.server).url:
        address = ServerAddress(server.url, server.model, server.key_variable)
        sampling = Sampling(rollout.max_tokens, rollout.temperature, rollout.top_p)
        check_server(address, sampling, config.model.vocab_size or tokens.size)
    why = f"{len(prompts):,} prompts"
    values: dict[str, tuple[object, str]] = {
        "task.folder": (folder, "the run file's folder"),
        "rollout.version": (prompts.version, why),
        "rollout.rewards_version": (judged, "the rewards and their files"),
        "rollout.count": (len(prompts), why),
        "rollout.sources": (sources if len(sources) > 1 else (), why),
        "rollout.places": (places, "where the run file names them"),
    }
    size = config.model.vocab_size
    if size == 0:
        return values | {"model.vocab_size": (tokens.size, "the tokenizer's")}
    if size < (needed := needed_size(path, tokens.end_id, tokens.begin_id)):
        raise ConfigError(
            f"model.vocab_size {size} is smaller than the tokenizer's vocabulary of {needed}",
            where=loaded.where("model.vocab_size"),
            remedy=f"use {needed}, or 0 for the tokenizer's",
        )
    return values


def describe_changed_rewards(loaded: LoadedConfig, stored: Mapping[str, Any]) -> list[str]:
    """Return a line for a run that continues with other rewards than it had. stored: the values of
    its last start."""
    before = stored.get("rollout", {}).get("rewards_version")
    if not before or before == loaded.config.rollout.rewards_version:
        return []
    return [
        "the files behind rollout.rewards have changed since the last start: completions are rated "
        "with the new ones from here on"
    ]
