"""The work that every loop does, and the bench that times it.

A loop is a function `run(bench)`. It builds its model from `bench.work` and calls `bench.ready()`.
From then on it calls `bench.done(loss)` after each optimizer step. The bench answers when the next
block of steps may begin, so two loops in two sets of processes can take turns. The clock runs from
the order to the end of the last step of a block.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.config.sections.model import ModelConfig
from holdfast.core.seeds import key_seed
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.model.decoder import Decoder
from holdfast.model.init import initialise

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Work:
    """Model, batch and optimizer; the same for every loop."""

    preset: str = "15m"
    vocabulary: int = 4096
    sequence: int = 256
    batch: int = 8  # samples of one step, over all ranks
    microbatches: int = 1  # per rank and step
    compile: bool = False
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 1
    distinct: int = 32  # batches, used in turn
    experts: int = 0  # of each block, a quarter as wide as its feed-forward, of which 2 are used
    skewed: bool = False  # whether most tokens take the first expert of a block

    @cached_property
    def config(self) -> ModelConfig:
        """Untied: torchtitan's plan shards the embedding and the head apart."""
        given = {"preset": self.preset, "vocab_size": self.vocabulary, "tied_embeddings": False}
        config = ModelConfig.model_validate(given)
        if not self.experts:
            return config
        experts: dict[str, object] = {
            "count": self.experts,
            "top_k": 2,
            "width": config.ffn_dim // 4,
        }
        family: dict[str, object] = {"family": "mixtral"}
        if self.skewed:
            experts |= {"scores": "sigmoid", "choice_bias": True}
            family = {"family": "dots1", "qk_norm": True}
        return ModelConfig.model_validate(given | family | {"experts": experts})

    @cached_property
    def tokens(self) -> Tensor:
        """[distinct, batch, sequence + 1]"""
        generator = torch.Generator().manual_seed(key_seed(self.seed, "benchmark"))
        shape = (self.distinct, self.batch, self.sequence + 1)
        return torch.randint(0, self.vocabulary, shape, generator=generator)

    def decoder(self) -> Decoder:
        """Our decoder with the initial weights of `seed`."""
        with torch.device("meta"):
            built = Decoder(self.config)
        built.to_empty(device="cpu")
        initialise(built, self.seed)
        return built

    def stages(self, pp: int) -> tuple[int, ...]:
        """Blocks of each pipeline stage: equally many, the first stages one more."""
        return tuple(len(range(i, self.config.layers, pp)) for i in range(pp))

    def stage(self, index: int, pp: int) -> range:
        """The blocks of one pipeline stage."""
        counts = self.stages(pp)
        begin = sum(counts[:index])
        return range(begin, begin + counts[index])

    def groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """Optimizer groups: matrices decay, gains do not. Names may carry a wrapper's prefix."""
        decays = {row.name: row.decay for row in decoder_parameters(self.config)}
        split: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in module.named_parameters():
            (own,) = (known for known in decays if f".{name}".endswith(f".{known}"))
            split[decays[own]].append(parameter)
        return [
            {"params": split[decay], "weight_decay": self.weight_decay if decay else 0.0}
            for decay in (True, False)
        ]

    def adamw(self, module: nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            self.groups(module), lr=self.learning_rate, betas=self.betas, eps=self.eps, fused=True
        )


class Bench:
    """One rank's side of a timing."""

    def __init__(self, work: Work, rank: int, world: int, meeting: str, replies: IO[str]):
        self.work, self.rank, self.world, self.meeting = work, rank, world, meeting
        self._replies = replies
        self._left = 0
        self._notes: list[dict[str, float]] = []
        self._losses: list[float | None] = []
        self._began = (0.0, 0.0)

    def join(self) -> None:
        """torch's default group over gloo, by a file: no port that another run could hold."""
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{self.meeting}", rank=self.rank, world_size=self.world
        )

    def microbatches(self, replicas: int | None = None) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Of each step, this rank's (inputs, targets), [n, S] each.

        replicas: how many share the samples out (None: every rank is one).
        """
        replicas = replicas or self.world
        share = self.work.batch // replicas
        first = self.rank * replicas // self.world * share
        index = 0
        while True:
            whole = self.work.tokens[index % self.work.distinct]
            mine = whole[first : first + share]
            parts = mine.chunk(self.work.microbatches)
            yield [(p[:, :-1].contiguous(), p[:, 1:].contiguous()) for p in parts]
            index += 1

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        places: Tensor | None = None,
        around: Callable[[bool], AbstractContextManager[None]] = lambda is_last: nullcontext(),
        clip: Callable[[], object] | None = None,
    ) -> None:
        """Train as ordered, until an order ends the process.

        Args:
            places: this rank's tokens of every sample; None: the rank has samples of its own.
            around: what a microbatch is computed in. is_last: of this step.
            clip: none: by the norm of the model's gradients.
        """
        mine = slice(None) if places is None else places
        self.ready()
        for parts in self.microbatches(None if places is None else 1):
            total = torch.zeros(())
            for index, (inputs, targets) in enumerate(parts):
                with around(index == len(parts) - 1):
                    loss = mean_loss(model(inputs[:, mine]), targets[:, mine]) / len(parts)
                    loss.backward()
                total += loss.detach()
            if clip is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.work.clip_norm)
            else:
                clip()
            optimizer.step()
            optimizer.zero_grad()
            self.done(total)

    def ready(self) -> None:
        """Everything is built: wait for the first order."""
        self._reply({"ready": True})
        self._wait()

    def done(self, loss: Tensor | float | None, notes: dict[str, float] | None = None) -> None:
        """End a step. `loss` is this rank's mean, or the global one, or None on a rank that does
        not know it. `notes` is what else the rank has measured. May end the process."""
        self._notes.append(notes or {})
        self._losses.append(None if loss is None else float(loss))
        self._left -= 1
        if self._left == 0:
            wall, cpu = time.perf_counter(), time.process_time()
            self._reply(
                {
                    "wall": wall - self._began[0],
                    "cpu": cpu - self._began[1],
                    "losses": self._losses,
                    "notes": self._notes,
                }
            )
            self._wait()

    def _wait(self) -> None:
        line = sys.stdin.readline()
        if not line.strip() or (order := json.loads(line)).get("stop"):
            sys.stderr.flush()
            os._exit(0)  # frameworks hang on to threads and ports; nothing is left to save
        self._left, self._losses, self._notes = int(order["steps"]), [], []
        self._began = (time.perf_counter(), time.process_time())

    def _reply(self, value: dict[str, Any]) -> None:
        self._replies.write(json.dumps(value) + "\n")
        self._replies.flush()


class MeanLoss(nn.Module):
    """A decoder with its mean cross-entropy, for frameworks that wrap one module."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """inputs, targets: [B, S] -> scalar"""
        return mean_loss(self.decoder(inputs), targets)


def blocks_of(decoder: Decoder) -> list[nn.Module]:
    """Its blocks in order."""
    layers: nn.Module = decoder.layers
    return list(layers.values() if isinstance(layers, nn.ModuleDict) else layers.children())


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """logits: [B, S, V], targets: [B, S] -> scalar"""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def compiled(module: M, work: Work) -> M:
    """Block by block in place, as our own loop compiles, if the work asks for it."""
    if work.compile:
        for block in module.modules():
            if type(block).__name__ == "Block":
                block.compile()
    return module
