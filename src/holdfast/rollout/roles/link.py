"""Connects a trainer with the roles of its run, for one generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.config.run import RunConfig
from holdfast.config.sections.objective import ObjectiveConfig
from holdfast.core.data.advantages import row_values
from holdfast.events import Event, RoleMissing
from holdfast.rollout.messages import ScoredCompletion
from holdfast.rollout.roles.batches import RolloutBatches
from holdfast.rollout.roles.client import QueueClient
from holdfast.rollout.roles.feed import CompletionFeed, FeedLink, StandIn
from holdfast.rollout.roles.policies import Publisher, policy_tag
from holdfast.rollout.roles.teacher import Teacher
from holdfast.rollout.roles.texts import Texts
from holdfast.rollout.roles.work import Actor, Scorer
from holdfast.training.engine.engine import StepEngine
from holdfast.training.objectives.policy import moments_of_advantages
from holdfast.wire.secret import Secret


@dataclass(frozen=True)
class TrainerPlace:
    """The place of a trainer."""

    agent: str  # "host:port" of its node's agent
    secret: Secret
    folder: Path  # of its node's policies
    device: torch.device
    emit: Callable[[Event], None]


@dataclass(frozen=True)
class ObjectiveRows:
    """The `RowValues` of an objective."""

    objective: ObjectiveConfig

    def of_group(
        self, rewards: NDArray[np.float64], kl: NDArray[np.float64], of_step: NDArray[np.float64]
    ) -> dict[str, NDArray[np.float64]]:
        return row_values(self.objective, rewards, kl, of_step)

    def of_step(
        self, rows: Sequence[ScoredCompletion], rewards: Sequence[float]
    ) -> dict[str, float]:
        if self.objective.kind != "ppo":
            return {}
        counts = [len(row.completion.tokens) for row in rows]
        numbers = [{"old": r.completion.logps, **r.completion.side} for r in rows]
        shape = len(rows), max(counts)
        side = {name: np.zeros(shape) for name in numbers[0]}
        for at, (row, count) in enumerate(zip(numbers, counts, strict=True)):
            for name, values in row.items():
                side[name][at, :count] = values
        side["score"] = np.broadcast_to(np.asarray(rewards)[:, None], shape).copy()
        return moments_of_advantages(self.objective, side, counts)


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
    batches.attach(feed, texts, engine.plan.share, ObjectiveRows(config.objective))
    return feed
