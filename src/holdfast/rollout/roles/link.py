"""Connects a trainer with the roles of its run, for one generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from holdfast.config.run import RunConfig
from holdfast.core.data.advantages import row_values
from holdfast.events import Event, RoleMissing
from holdfast.rollout.roles.batches import RolloutBatches
from holdfast.rollout.roles.client import QueueClient
from holdfast.rollout.roles.feed import CompletionFeed, FeedLink, StandIn
from holdfast.rollout.roles.policies import Publisher, policy_tag
from holdfast.rollout.roles.teacher import Teacher
from holdfast.rollout.roles.texts import Texts
from holdfast.rollout.roles.work import Actor, Scorer
from holdfast.training.engine.engine import StepEngine
from holdfast.wire.secret import Secret


@dataclass(frozen=True)
class TrainerPlace:
    """The place of a trainer."""

    agent: str  # "host:port" of its node's agent
    secret: Secret
    folder: Path  # of its node's policies
    device: torch.device
    emit: Callable[[Event], None]


def connect_roles(
    config: RunConfig, batches: RolloutBatches, engine: StepEngine, place: TrainerPlace, step: int
) -> CompletionFeed:
    """Publish the policies that the state after `step` has, and attach a feed to the batches. Each
    later update publishes its policy. Call it on the training thread."""
    skips, rank = batches.skips, engine.groups.rank
    node = engine.groups.topology.nodes[rank]
    publisher = Publisher(place.folder, config, place.agent)
    publisher.publish_all(engine, skips, step)
    engine.on_applied = lambda step: publisher.publish_newest(engine, skips, step)
    tag_of = cache(lambda policy: policy_tag(config, policy, skips))
    texts = batches.texts or Texts.open(config)
    name = f"trainer {rank} of generation {engine.groups.topology.generation}"

    def client() -> QueueClient:
        return QueueClient(lambda: place.agent, place.secret)

    def open_actor() -> StandIn:
        return Actor(
            config,
            client(),
            f"{name}, as actor",
            node,
            texts=texts,
            device=place.device,
            folder=place.folder,
            slots=config.rollout.slots,
            stands_in=True,
        )

    def open_scorer() -> StandIn:
        return Scorer(config, client(), f"{name}, as scorer", node, texts=texts, stands_in=True)

    weights = [entry.weight for entry in config.rollout.rewards]
    link = FeedLink(
        rank,
        client(),
        lambda: publisher.parts,
        tag_of,
        lambda numbers: sum(w * n for w, n in zip(weights, numbers, strict=True)),
        open_actor,
        open_scorer,
        lambda step, role: place.emit(RoleMissing(role, rank, step=step)),
    )
    feed = CompletionFeed(config.rollout, link)
    batches.emit = place.emit
    if config.objective.kind == "distill" and batches.teacher is None:
        batches.teacher = Teacher.open(config, place.device)
    batches.attach(feed, texts, engine.plan.share, partial(row_values, config.objective))
    return feed
