"""Shared parts of the tests of the train room: a tiny run file, text-free batches, a short
training."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holdfast.config.run import RunConfig
from holdfast.core.seeds import key_seed
from holdfast.core.sharding.reduction_tree import Shares, deal
from holdfast.layout import Layout, place_layout
from holdfast.parallel.axes.process_groups import connect
from holdfast.parallel.axes.replica_groups import ConnectSettings
from holdfast.parallel.torch_compat import Store
from holdfast.training.engine.build import build_engine
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.vote import StepVerdict

CPU = torch.device("cpu")
VOCABULARY, LENGTH = 64, 12


def tiny(**changes: Any) -> RunConfig:
    """12 microbatches of 2 samples a step; clipping is active in each (`clip_norm` 0.05)."""
    value: dict[str, Any] = {
        "data": {"sequence_length": LENGTH},
        "model": {
            "preset": None,
            "layers": 2,
            "dim": 16,
            "heads": 2,
            "kv_heads": 1,
            "ffn_dim": 24,
            "vocab_size": VOCABULARY,
            "tied_embeddings": True,
        },
        "train": {
            "steps": 20,
            "batch_size": 24,
            "microbatch_size": 2,
            "optimizer": {"learning_rate": 0.01, "clip_norm": 0.05},
            "schedule": {"warmup_steps": 4},
        },
        "layout": {"bucket_mb": 0.004},
    }
    return changed(value, changes)


def changed(value: dict[str, Any], changes: Mapping[str, Any]) -> RunConfig:
    """A run file with some keys set: `train__steps` is `train.steps`."""
    for key, inner in changes.items():
        section, _, name = key.partition("__")
        value.setdefault(section, {})[name] = inner
    return RunConfig.model_validate(value)


@dataclass(frozen=True)
class Fed:
    """One microbatch of random tokens, or its `part`-th of `parts` rows."""

    inputs: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None
    tokens: int
    side: Mapping[str, torch.Tensor] = field(default_factory=dict)


def feed(
    step: int,
    leaf: int,
    size: int = 2,
    part: int = 0,
    parts: int = 1,
    vocabulary: int = VOCABULARY,
    length: int = LENGTH,
    documents: bool = False,
) -> Fed:
    """Tokens are a function of (step, leaf). A few targets are masked, differently per leaf.
    documents: rows hold several, which begin at other tokens in each."""
    generator = np.random.default_rng(key_seed(7, "test", step, leaf))
    tokens = generator.integers(0, vocabulary, (size, length + 1))
    tokens[:, 1::3] = tokens[:, 0:-1:3][:, : tokens[:, 1::3].shape[1]]  # something to learn
    targets = tokens[:, 1:].copy()
    targets[0, : leaf % 5] = -100
    rows = slice(part * size // parts, (part + 1) * size // parts)
    inputs, targets = tokens[rows, :-1].copy(), targets[rows]
    numbers = None
    if documents:
        begins = (generator.random((size, length)) < 0.2)[rows]
        numbers = torch.from_numpy(begins.cumsum(1).astype(np.int32))
    carried = int((targets != -100).sum())
    return Fed(torch.from_numpy(inputs), torch.from_numpy(targets), numbers, carried)


def engine(
    config: RunConfig,
    rank: int,
    store: Store,
    *,
    replicas: int = 1,
    dp_shard: int = 1,
    shares: Sequence[Shares] | None = None,
    generation: int = 1,
    seconds: float = 60.0,
) -> StepEngine:
    """Connected and initialised. shares: dealings taken in turn, a call at a time."""
    layout = Layout(dp_replicate=replicas, dp_shard=dp_shard)
    topology = place_layout(layout, generation, ("node",) * layout.world_size)
    groups = connect(ConnectSettings(store, CPU, seconds=seconds), topology, rank)
    dealer = deal
    if shares is not None:
        by_leaves = {sum(len(s) for s in dealing): dealing for dealing in shares}
        dealer = lambda leaves, n: by_leaves[leaves]  # noqa: E731
    made = build_engine(config, groups, CPU, dealer=dealer)
    made.initialise(config.seed)
    return made


def one_step(made: StepEngine, step: int) -> StepVerdict:
    place = made.groups.coordinate
    share = made.begin(step)
    size = made.train.microbatch_size
    made.compute(
        [feed(step, leaf, size, place.dp_shard, made.groups.degree("dp_shard")) for leaf in share]
    )
    verdict = made.reduce()
    made.apply(verdict)
    return verdict


def train(made: StepEngine, steps: int, first: int = 1) -> list[StepVerdict]:
    return [one_step(made, step) for step in range(first, first + steps)]


def digest(made: StepEngine) -> str:
    """Of all state that this rank holds, bit by bit."""
    state = hashlib.sha256()
    for local in made.state():
        state.update(local.name.encode())
        state.update(local.tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
