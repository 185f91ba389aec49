"""The result of a task: a value and a weight for each item, and where a run keeps it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from holdfast.core.json_parsing import parse_json
from holdfast.events import TaskEvaluated
from holdfast.wire.journal import JournalWriter
from holdfast.wire.store.run_store import AlreadyExistsError, MissingKeyError, RunStore

PREFIX = "evaluations/"


@dataclass(frozen=True)
class TaskResult:
    """What a model got in a task. The score is the sum of values over the sum of weights."""

    task: str
    digest: str  # of rows, tokens and keys of the task
    metric: str  # that values are of
    higher_is_better: bool
    items: Sequence[Sequence[float]]  # (value, weight) of each row, in the order of the rows
    replies: Sequence[str] = ()  # of each row; empty for a task without replies
    metrics: Mapping[str, float] = field(default_factory=dict)  # further numbers, by name
    seconds: float = 0.0

    @property
    def score(self) -> float:
        return sum(value for value, _ in self.items) / sum(weight for _, weight in self.items)

    def to_json(self) -> dict[str, Any]:
        """All fields, and the score."""
        return {"score": self.score, "n": len(self.items), **asdict(self)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> TaskResult:
        return TaskResult(**{k: v for k, v in value.items() if k not in ("score", "n")})

    @property
    def line(self) -> str:
        """One line for people."""
        more = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        return f"{self.task}: {self.metric} {self.score:.4f} of {len(self.items)} items{more}"


class TaskResults(Protocol):
    """A place for results, by task and digest."""

    def get(self, task: str, digest: str) -> TaskResult | None: ...
    def put(self, result: TaskResult) -> None: ...


class KeptResults:
    """Results below a key of a store, each created once."""

    def __init__(self, store: RunStore, prefix: str):
        self.store, self._prefix = store, prefix

    def get(self, task: str, digest: str) -> TaskResult | None:
        try:
            return TaskResult.from_json(parse_json(self.store.get(self._key(task, digest))))
        except MissingKeyError:
            return None

    def put(self, result: TaskResult) -> None:
        content = json.dumps(result.to_json(), separators=(",", ":")).encode()
        with suppress(AlreadyExistsError):  # another evaluator was faster, with the same numbers
            self.store.create(self._key(result.task, result.digest), content)

    def _key(self, task: str, digest: str) -> str:
        return f"{self._prefix}/{task}-{digest}.json"


class Results(KeptResults):
    """The results of one checkpoint of a run."""

    def __init__(self, store: RunStore, step: int, generation: int):
        super().__init__(store, f"{PREFIX}{step:010d}-{generation:010d}")
        self._step, self._generation = step, generation
        self._writer = f"evaluate-{secrets.token_hex(4)}"

    def put(self, result: TaskResult) -> None:
        """Enter a result into the journal, then keep it. A killed caller does both again."""
        writer = JournalWriter(self.store, self._writer, self._generation)
        writer.emit(
            TaskEvaluated(
                result.task,
                result.metric,
                result.score,
                len(result.items),
                result.higher_is_better,
                result.seconds,
                dict(result.metrics),
                step=self._step,
            )
        )
        writer.flush(sync=True)
        super().put(result)


def evaluated_steps(store: RunStore) -> list[int]:
    """Return the steps of checkpoints that have a result, rising."""
    found = (key.removeprefix(PREFIX).partition("-")[0] for key in store.list(PREFIX))
    return sorted({int(step) for step in found if step.isdecimal()})
