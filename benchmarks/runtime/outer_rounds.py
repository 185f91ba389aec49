"""Learners against data parallelism at equal tokens, and rules against hostile learners.

    python -m benchmarks.runtime.outer_rounds loss
    python -m benchmarks.runtime.outer_rounds codecs
    python -m benchmarks.runtime.outer_rounds hostile
    python -m benchmarks.runtime.outer_rounds overlap --learners 4 --every 30

One process computes all learners in turn, which changes no bit of a round. A byte model of 60
thousand parameters trains on this repository's docs. The loss is that of texts that it has not
seen, in nats a byte. The outer optimizer of a cell is the best of `UPDATES` on the first seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import inf, isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any, get_args

import torch
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.config.sections.outer import Average
from holdfast.core.seeds import key_seed
from holdfast.data.stream.loader import TensorMicrobatch
from holdfast.errors import NonFiniteError
from holdfast.layout import Layout, place_layout
from holdfast.parallel.axes.process_groups import connect
from holdfast.parallel.axes.replica_groups import ConnectSettings
from holdfast.parallel.outer import rules
from holdfast.parallel.torch_compat import memory_store
from holdfast.training.engine import learners as rounds
from holdfast.training.engine.build import build_engine

LENGTH, BATCH, WARMUP = 64, 32, 30
UPDATES: tuple[dict[str, Any], ...] = (
    {"name": "nesterov", "learning_rate": 0.4, "momentum": 0.6},
    {"name": "nesterov", "learning_rate": 0.7, "momentum": 0.9},
    {"name": "sgd", "learning_rate": 1.0},
)
SEEDS = (1, 2, 3)
STUDENT_T_95 = 4.303  # two-sided, of three values
HOSTILE_LEARNERS, HOSTILE_STEPS = 8, 10
RULES = tuple(rule for rule in get_args(Average) if rule not in ("token_weighted", "rda"))
Attack = Callable[[Tensor, Tensor, int], Tensor]
"""(honest changes, the honest changes of the round before, number of a hostile learner) -> its own.
[learners, n] -> [n]"""


def _one_huge(honest: Tensor, before: Tensor, at: int) -> Tensor:
    return honest[at].index_fill(0, torch.tensor(7), 1e30)


ATTACKS: dict[str, Attack] = {
    "NaN": lambda honest, before, at: torch.full_like(honest[at], torch.nan),
    "1e30": _one_huge,
    "sign x 10": lambda honest, before, at: -10 * honest[at],
    "inner product": lambda honest, before, at: -2 * honest.mean(0),
    "ALIE": lambda honest, before, at: honest.mean(0) - 1.5 * honest.std(0),
    "mimic": lambda honest, before, at: honest[0],
    "stale copy": lambda honest, before, at: before[at],
    "no work": lambda honest, before, at: torch.zeros_like(honest[at]),
}


@dataclass(frozen=True)
class Texts:
    """Sources of samples, of which each has the same number. Of each, the last twentieth is held
    out. sources: bytes [n] each."""

    sources: tuple[Tensor, ...]

    def samples(self, seed: int, first: int, count: int, length: int) -> TensorMicrobatch:
        """Return the samples at some positions of the order of a seed."""
        return self._draw(seed, first, count, length, False)

    def held_out(self, count: int, length: int) -> TensorMicrobatch:
        """Return samples of what is held out."""
        return self._draw(0, 0, count, length, True)

    def _draw(
        self, seed: int, first: int, count: int, length: int, is_held_out: bool
    ) -> TensorMicrobatch:
        rows = []
        for at in range(first, first + count):
            text = self.sources[at % len(self.sources)]
            split = len(text) * 19 // 20
            low, high = (split, len(text)) if is_held_out else (0, split)
            start = low + key_seed(seed, "sample", at) % (high - low - length - 1)
            rows.append(text[start : start + length + 1])
        drawn = torch.stack(rows)
        return TensorMicrobatch(drawn[:, :-1], drawn[:, 1:], None, [], float(count * length))


def bytes_of(folder: str, pattern: str) -> Tensor:
    """Return the bytes of the files of a folder of this repository: [n]"""
    files = sorted((Path(__file__).parents[2] / folder).rglob(pattern))
    return torch.tensor(list(b"".join(path.read_bytes() for path in files)))


DOCS = Texts((bytes_of("docs", "*.md"),))


def config_of(seed: int, steps: int, optimizer: str, outer: dict[str, Any]) -> RunConfig:
    """steps: inner ones. outer: without `learners`, data parallelism."""
    every = outer.get("every_steps", 1)
    learners = outer.get("learners", 0)
    rates = {"adamw": 4e-3, "muon": 4e-3}
    return RunConfig.model_validate(
        {
            "seed": seed,
            "data": {"sequence_length": LENGTH},
            "model": {
                "preset": None,
                "layers": 2,
                "dim": 48,
                "heads": 2,
                "kv_heads": 2,
                "ffn_dim": 96,
                "vocab_size": 256,
                "tied_embeddings": True,
            },
            "train": {
                "steps": steps // every,
                "batch_size": BATCH,
                "microbatch_size": BATCH // max(1, learners),
                "optimizer": {"name": optimizer, "learning_rate": rates[optimizer]},
                "schedule": {"kind": "cosine", "warmup_steps": max(1, WARMUP // every)},
            },
            "outer": outer,
        }
    )


def train(
    config: RunConfig,
    weights: list[Tensor] | None = None,
    texts: Texts = DOCS,
    held_out: int = 512,
    steps: int | None = None,
) -> float:
    """Train; the loss on texts that were not trained on. A NaN anywhere is an infinite loss.

    weights: the run begins with them and leaves its own there. None, or an empty list: initial
    weights. held_out: samples of the loss. steps: fewer than the run has.
    """
    topology = place_layout(Layout(), 1, ("here",))
    groups = connect(ConnectSettings(memory_store(), torch.device("cpu")), topology, 0)
    engine = build_engine(config, groups, torch.device("cpu"))
    engine.initialise(config.seed)
    masters = engine.parameters.master_tensors
    if weights:
        with torch.no_grad():
            torch._foreach_copy_(masters, weights)
        engine.parameters.refresh()
    length = config.data.sequence_length
    size, leaves = engine.train.microbatch_size, engine.plan.leaves(1)
    try:
        for step in range(1, (config.train.steps if steps is None else steps) + 1):
            first = (step - 1) * size * leaves
            share = engine.begin(step)
            engine.compute(
                [texts.samples(config.seed, first + k * size, size, length) for k in share]
            )
            engine.apply(engine.reduce())
    except NonFiniteError:
        return inf
    if weights is not None:
        weights[:] = [tensor.clone() for tensor in masters]
    unseen = texts.held_out(held_out, length)
    with torch.no_grad():
        loss = engine.executor.evaluate([unseen], lambda: None)
    found = float(loss[0].flatten()[0]) / unseen.tokens
    return found if isfinite(found) else inf


@cache
def _data_parallel(seed: int, steps: int, optimizer: str) -> float:
    return train(config_of(seed, steps, optimizer, {}))


def _interval(values: list[float]) -> str:
    half = STUDENT_T_95 * stdev(values) / len(values) ** 0.5
    return f"{mean(values):+.1f} % +- {half:.1f}"


def compare_losses(
    steps: int, optimizers: list[str], cells: list[tuple[int, int]], **more: Any
) -> None:
    """Print the loss of each cell over that of data parallelism, with 95 % intervals of 3 seeds."""
    for optimizer in optimizers:
        base = {seed: _data_parallel(seed, steps, optimizer) for seed in SEEDS}
        read = f"{steps * BATCH * LENGTH:,} bytes"
        print(f"{optimizer}: data parallel {mean(base.values()):.4f} nats, {read}")
        for learners, every in cells:
            outer = {"learners": learners, "every_steps": every, **more}

            def run(
                seed: int,
                update: dict[str, Any],
                outer: dict[str, Any] = outer,
                name: str = optimizer,
            ) -> float:
                return train(config_of(seed, steps, name, outer | {"optimizer": update}))

            first = [run(SEEDS[0], update) for update in UPDATES]
            best = min(range(len(UPDATES)), key=lambda i: first[i])
            losses = [first[best], *(run(seed, UPDATES[best]) for seed in SEEDS[1:])]
            over = [100 * (loss / base[seed] - 1) for seed, loss in zip(SEEDS, losses, strict=True)]
            shown = " ".join(str(value) for value in UPDATES[best].values())
            print(f"  K {learners}  H {every:3}  {_interval(over)}  ({shown})", flush=True)


def compare_overlaps(steps: int, cells: list[tuple[int, int]]) -> None:
    """Print the loss with overlap over that of the same rounds without, with 95 % intervals."""

    def losses(learners: int, every: int, **more: Any) -> list[float]:
        outer = {"learners": learners, "every_steps": every, "optimizer": UPDATES[0], **more}
        return [train(config_of(seed, steps, "adamw", outer)) for seed in SEEDS]

    for learners, every in cells:
        plain = losses(learners, every)
        for tau, alpha in product((1, every // 5, every // 2), (0.0, 0.5)):
            found = losses(learners, every, overlap_steps=tau, overlap_alpha=alpha)
            over = [100 * (loss / base - 1) for loss, base in zip(found, plain, strict=True)]
            print(
                f"  K {learners}  H {every:3}  overlap {tau:2}  alpha {alpha}  {_interval(over)}",
                flush=True,
            )


@contextmanager
def _attacked(attack: Attack, hostile: int) -> Iterator[None]:
    """The last learners send what an attack makes of their changes."""
    before: list[Tensor] = []

    def combined(self: Any, changes: list[Tensor]) -> list[Tensor]:
        honest = torch.stack(changes)
        last = before.pop() if before else torch.zeros_like(honest)
        before.append(honest.clone())
        sent = honest.clone()
        for at in range(len(sent) - hostile, len(sent)):
            sent[at] = attack(honest, last, at)
        if not self._rule:
            return list(sent)
        result = rules.combine(self._rule, sent, self._faulty).mul_(len(sent))
        return [result, *(torch.zeros_like(result) for _ in changes[1:])]

    original = rounds.LearnerExecutor._combined
    rounds.LearnerExecutor._combined = combined  # type: ignore[method-assign]
    try:
        yield
    finally:
        rounds.LearnerExecutor._combined = original  # type: ignore[method-assign]


def compare_rules(steps: int, counts: list[int]) -> None:
    """Print the loss with hostile learners over the clean one of the mean, by attack and rule."""

    def outer(rule: str, faulty: int) -> dict[str, Any]:
        update = {"name": "nesterov", "learning_rate": 0.4, "momentum": 0.6}
        found = {"learners": HOSTILE_LEARNERS, "every_steps": HOSTILE_STEPS, "optimizer": update}
        # bf16 has every learner send its change, as a rule does.
        return found | {"average": rule, "faulty": faulty, "codec": {"name": "bf16"}}

    clean = train(config_of(1, steps, "adamw", outer("mean", 1)))
    print(f"clean mean of {HOSTILE_LEARNERS} learners: {clean:.4f} nats")
    print(f"{'':14}" + "".join(f"{rule:>18}" for rule in RULES))
    cases = [(0, "none", ATTACKS["mimic"])]
    cases += [(count, name, attack) for count in counts for name, attack in ATTACKS.items()]
    for hostile, name, attack in cases:
        line = f"{hostile} {name:12}"
        for rule in RULES:
            with _attacked(attack, hostile):
                config = config_of(1, steps, "adamw", outer(rule, max(1, hostile)))
                line += f"{train(config) / clean:18.3f}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("loss", "codecs", "hostile", "overlap"))
    parser.add_argument("--steps", type=int, default=240, help="inner steps")
    parser.add_argument("--optimizers", nargs="*", default=["adamw", "muon"])
    parser.add_argument("--learners", nargs="*", type=int, default=[2, 4, 8])
    parser.add_argument("--every", nargs="*", type=int, default=[10, 30])
    parser.add_argument("--hostile", nargs="*", type=int, default=[1, 2], help="learners")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cells = list(product(given.learners, given.every))
    if given.what == "hostile":
        compare_rules(given.steps, given.hostile)
    elif given.what == "overlap":
        compare_overlaps(given.steps, cells)
    elif given.what == "loss":
        compare_losses(given.steps, given.optimizers, cells)
    else:
        for codec in (
            {"name": "none"},
            {"name": "bf16"},
            {"name": "int8"},
            {"name": "int4"},
            {"name": "int2"},
            {"name": "topk", "share": 0.05},
            {"name": "powersgd", "rank": 4},
        ):
            print(codec)
            compare_losses(given.steps, given.optimizers, cells, codec=codec)


if __name__ == "__main__":
    main()
