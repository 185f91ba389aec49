"""The gate of a registry: rules of a file that a version must keep to be promoted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from pydantic import Field

from holdfast.config.loading.section_file import read_section
from holdfast.config.sections.base import Section
from holdfast.config.sections.evaluate import EvaluationTask
from holdfast.errors import ConfigError, UserError
from holdfast.evaluation.results import TaskResult
from holdfast.evaluation.tasks import LOSS, metric_of
from holdfast_platform.registry.registry import Registry, State

_CHUNK = 1 << 22  # drawn items at a time


class GateRefusedError(UserError):
    """A version that breaks a rule of the gate."""

    exit_code = 3


class GateTask(EvaluationTask):
    """A task, and what a version must get in it."""

    floor: float | None = None
    """the score must be at least this"""
    ceiling: float | None = None
    """the score must be at most this; of tasks whose score is a loss"""
    require: Literal["not_worse", "within", "better"] = "not_worse"
    """not_worse: the interval of the difference does not lie below 0; within: it lies above
    -margin; better: it lies above 0"""
    margin: float = Field(0.0, ge=0, description="of require: within")

    def broken_rules(self) -> Iterator[str]:
        if self.margin and self.require != "within":
            yield f"margin {self.margin} has no effect with require: {self.require}: use within"


class GateRules(Section):
    """The file of a gate."""

    tasks: tuple[GateTask, ...] = Field(min_length=1)
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """of the interval of each difference"""
    resamples: int = Field(10_000, ge=1000)
    """of the bootstrap"""
    seed: int = 0
    max_bytes: int | None = Field(None, ge=1)
    """of all files of the version"""
    max_bytes_ratio: float | None = Field(None, gt=0)
    """bytes of the version over those of the promoted one"""


@dataclass(frozen=True)
class Comparison:
    """A task of two versions. Differences are turned so that above 0 is better."""

    task: str
    metric: str
    score: float  # of the candidate
    other: float  # of the version that it is compared with
    difference: float
    low: float  # of the interval
    high: float
    n: int

    def __str__(self) -> str:
        return (
            f"{self.task}: {self.metric} {self.score:.4f} against {self.other:.4f}, difference "
            f"{self.difference:+.4f} in [{self.low:+.4f}, {self.high:+.4f}] of {self.n} items"
        )


def read_rules(path: Path) -> GateRules:
    """Read a gate's file; its paths start at its folder. Raises ConfigError."""
    rules = read_section(path, GateRules, "docs/guide/evaluation.md")
    located = [t.model_copy(update={"path": str(path.parent / t.path)}) for t in rules.tasks]
    return rules.model_copy(update={"tasks": tuple(located)})


def bootstrap(
    candidate: TaskResult, other: TaskResult, confidence: float, resamples: int, seed: int
) -> Comparison:
    """Compare two results of the same rows. Items are drawn in pairs, with replacement; the
    interval has the quantiles of the differences. Raises ConfigError for other rows."""
    is_loss = candidate.metric == LOSS and candidate.digest != other.digest
    if len(candidate.items) != len(other.items) or candidate.metric != other.metric or is_loss:
        raise ConfigError(
            f"the versions read the rows of {candidate.task} in other ways (tokens, or metric)",
            where=candidate.task,
            remedy="use a task of replies or choices for models with unlike tokenizers",
        )
    ours, theirs = np.array(candidate.items), np.array(other.items)
    sign = 1.0 if candidate.higher_is_better else -1.0
    draw, count = np.random.default_rng(seed), len(ours)
    drawn: list[Any] = []
    for start in range(0, resamples, rows := max(1, _CHUNK // count)):
        at = draw.integers(0, count, (min(rows, resamples - start), count))
        sums = ours[at].sum(1), theirs[at].sum(1)
        drawn.append(sums[0][:, 0] / sums[0][:, 1] - sums[1][:, 0] / sums[1][:, 1])
    tail = (1 - confidence) / 2
    low, high = sorted(sign * np.quantile(np.concatenate(drawn), [tail, 1 - tail]))
    difference = sign * (candidate.score - other.score)
    scores = candidate.score, other.score
    return Comparison(
        candidate.task, candidate.metric, *scores, difference, float(low), float(high), count
    )


def _refuse_other_limit(task: GateTask) -> None:
    """Raises ConfigError for a floor of a loss, and for a ceiling of another score."""
    metric = metric_of(task)
    key, other = ("ceiling", task.floor) if metric == LOSS else ("floor", task.ceiling)
    if other is not None:
        raise ConfigError(
            f"the score of {task.label} is {metric}, for which the limit is a {key}",
            where=task.label,
            remedy=f"write {key} in its place",
        )


class Gate:
    """Decides whether a version may be promoted."""

    def __init__(self, registry: Registry, rules: GateRules, say: Callable[[str], None]):
        self._registry, self._rules, self._say = registry, rules, say
        self._found: dict[int, list[TaskResult]] = {}

    def promote(self, text: str) -> dict[str, Any]:
        """Promote a version. Raises GateRefusedError with the first broken rule. If another one is
        promoted meanwhile, the version is compared with that."""
        for task in self._rules.tasks:
            _refuse_other_limit(task)

        def decide(state: State) -> dict[str, Any]:
            version, current = state.find(text), state.current
            verdict = self._verdict(state, version, current)
            return {"kind": "promote", "version": version, "replaces": current, "gate": verdict}

        return self._registry.record(decide)

    def compare(self, version: int, other: int) -> list[Comparison]:
        rules = self._rules
        pairs = zip(self._evaluate(version), self._evaluate(other), strict=True)
        how = rules.confidence, rules.resamples, rules.seed
        return [bootstrap(ours, theirs, *how) for ours, theirs in pairs]

    def _verdict(self, state: State, version: int, current: int | None) -> Mapping[str, Any]:
        bytes_of = {v: _bytes(state, v) for v in (version, current) if v is not None}
        size, rules = bytes_of[version], self._rules
        if rules.max_bytes is not None and size > rules.max_bytes:
            self._refuse(version, f"it has {size} bytes, and max_bytes is {rules.max_bytes}")
        for task, result in zip(rules.tasks, self._evaluate(version), strict=True):
            self._check_limits(version, task, result)
        if current is None or current == version:
            return {"bytes": size}
        ratio = size / bytes_of[current]
        if rules.max_bytes_ratio is not None and ratio > rules.max_bytes_ratio:
            limit = f"max_bytes_ratio is {rules.max_bytes_ratio:g}"
            self._refuse(version, f"it has {ratio:.3g} times the promoted one's bytes, and {limit}")
        found = self.compare(version, current)
        for task, one in zip(rules.tasks, found, strict=True):
            bound = {"not_worse": one.high >= 0, "within": one.low > -task.margin}
            if not bound.get(task.require, one.low > 0):
                least = f"at {rules.confidence:.0%}, and the rule is {task.require}"
                self._refuse(version, f"against version {current}, {one} {least}")
            self._say(str(one))
        return {"bytes": size, "tasks": [asdict(one) for one in found]}

    def _check_limits(self, version: int, task: GateTask, result: TaskResult) -> None:
        key, limit = ("floor", task.floor) if result.higher_is_better else ("ceiling", task.ceiling)
        sign = 1 if result.higher_is_better else -1
        if limit is not None and sign * result.score < sign * limit:
            self._refuse(
                version, f"{task.label}: {result.metric} {result.score:.4f}, and {key} is {limit:g}"
            )

    def _refuse(self, version: int, why: str) -> None:
        raise GateRefusedError(
            f"version {version} is not promoted: {why}",
            where="gate",
            remedy="train it further, or change the rule",
        )

    def _evaluate(self, version: int) -> list[TaskResult]:
        if version not in self._found:
            from holdfast.evaluation.model import open_model
            from holdfast.evaluation.tasks import evaluate_tasks

            with TemporaryDirectory() as folder:
                self._registry.fetch(version, Path(folder, "model"))
                model = open_model(Path(folder, "model"), None, None, self._say)
                results = self._registry.results(version)
                self._say(f"version {version}:")
                self._found[version] = evaluate_tasks(model, self._rules.tasks, self._say, results)
        return self._found[version]


def _bytes(state: State, version: int) -> int:
    return sum(file["bytes"] for file in state.versions[version]["files"].values())
