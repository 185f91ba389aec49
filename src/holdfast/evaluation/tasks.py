"""Tasks from files of rows: exact match of replies, log-likelihood of choices, loss of texts."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.config.sections.data import SourceConfig
from holdfast.config.sections.evaluate import EvaluationTask
from holdfast.config.sections.rewards import RewardConfig
from holdfast.core.json_parsing import parse_json
from holdfast.data.read.containers import open_text
from holdfast.data.read.files import canonical_json
from holdfast.data.read.source_files import find_files
from holdfast.errors import DataError
from holdfast.evaluation.model import EvaluatedModel
from holdfast.evaluation.results import Results, TaskResult, TaskResults
from holdfast.rollout.prompts import Prompt, Prompts, read_prompts
from holdfast.rollout.rewards.rewards import Rewards

LOSS = "nats_per_token"
_DIGEST_CHARS = 12


@dataclass(frozen=True)
class _Item:
    """What one row got."""

    value: float
    weight: float = 1.0
    reply: str = ""
    more: float = 0.0  # choices: 1 if right by the loss per byte; texts: bytes


def evaluate_tasks(
    model: EvaluatedModel,
    tasks: Sequence[EvaluationTask],
    say: Callable[[str], None],
    results: TaskResults | None = None,
) -> list[TaskResult]:
    """Return the result of each task, and keep the new ones. Raises UserError."""
    found = []
    for task in tasks:
        rows = TaskRows(task, model)
        result = None if results is None else results.get(task.label, rows.digest)
        if result is None:
            result = rows.evaluate()
            if results is not None:
                results.put(result)
        say(result.line)
        found.append(result)
    return found


def results_of(model: EvaluatedModel) -> Results | None:
    """Return where the results of a run's checkpoint are kept; None for a folder."""
    if model.run is None or model.checkpoint is None:
        return None
    commit = model.checkpoint.commit
    return Results(model.run.store, commit.step, commit.generation)


def metric_of(task: EvaluationTask) -> str:
    """Return the metric of a task's score, from its first row. Raises DataError."""
    first = _first_row(task, f"the task {task.label}")
    if task.text in first and task.prompt not in first:
        return LOSS
    return "accuracy" if task.choices in first else "exact_match"


class TaskRows:
    """The rows of a task as a model reads them. Raises DataError for a row that does not fit."""

    def __init__(self, task: EvaluationTask, model: EvaluatedModel):
        self._task, self._model, self._where = task, model, f"the task {task.label}"
        self._metric = metric_of(task)
        self._is_text = self._metric == LOSS
        entry = task.model_copy(update={"prompt": task.text}) if self._is_text else task
        all_rows = read_prompts([entry], model.texts.data, key=self._where)
        self._rows: Prompts = Prompts(list(all_rows)[: task.limit or len(all_rows)])
        if not self._is_text and (odd := next((p for p in self._rows if not p.answer), None)):
            raise DataError(
                f"the row has no {task.answer!r}, which a reply or a choice is compared with",
                where=odd.where,
                remedy="write the answer, or leave the row out",
            )
        keys = task.model_dump(exclude={"path", "name"})
        kept = canonical_json([self._rows.version, keys])
        self.digest = hashlib.sha256(kept).hexdigest()[:_DIGEST_CHARS]

    def evaluate(self) -> TaskResult:
        """Return what the model gets. Raises DataError."""
        start = time.monotonic()
        if self._is_text:
            items = [self._text(prompt) for prompt in self._rows]
        elif self._metric == "accuracy":
            items = [self._choices(prompt) for prompt in self._rows]
        else:
            items = self._replies()
        result = TaskResult(
            self._task.label,
            self.digest,
            self._metric,
            not self._is_text,
            [(item.value, item.weight) for item in items],
            [item.reply for item in items] if not self._is_text else (),
            dict(self._metrics(items)),
            time.monotonic() - start,
        )
        if not math.isfinite(result.score):
            raise DataError(
                "the model gives numbers that are not finite",
                where=self._where,
                remedy="evaluate an older checkpoint with --step",
            )
        return result

    def _metrics(self, items: Sequence[_Item]) -> Iterator[tuple[str, float]]:
        total = sum(item.value for item in items)
        if self._is_text:
            yield "perplexity", math.exp(min(700.0, total / sum(item.weight for item in items)))
            yield "bits_per_byte", total / math.log(2) / sum(item.more for item in items)
        if self._metric == "accuracy":
            yield "accuracy_per_byte", sum(item.more for item in items) / len(items)
        by: dict[str, list[_Item]] = {}
        for prompt, item in zip(self._rows, items, strict=True):
            if self._task.by is not None:
                by.setdefault(str(prompt.columns.get(self._task.by)), []).append(item)
        for name, part in sorted(by.items()):
            yield name, sum(i.value for i in part) / sum(i.weight for i in part)

    def _text(self, prompt: Prompt) -> _Item:
        if not isinstance(prompt.said, str) or len(prompt.ids) < 2:
            raise DataError(
                "the row's text has no token to predict, or is no text",
                where=prompt.where,
                remedy="leave the row out",
            )
        loss = self._model.text_loss(prompt.ids)
        return _Item(loss, len(prompt.ids) - 1, more=len(prompt.said.encode()))

    def _choices(self, prompt: Prompt) -> _Item:
        choices, answer = prompt.columns.get(self._task.choices), prompt.answer or ""
        if not isinstance(choices, list) or not all(isinstance(c, str) and c for c in choices):
            raise DataError(
                f"{self._task.choices!r} is no list of texts",
                where=prompt.where,
                remedy="write each choice as it follows the prompt, with its space",
            )
        if answer not in choices and not (answer.isdecimal() and int(answer) < len(choices)):
            raise DataError(
                f"the answer {answer!r} is none of the {len(choices)} choices",
                where=prompt.where,
                remedy="write one of them, or its number from 0",
            )
        right = choices.index(answer) if answer in choices else int(answer)
        sums = [self._choice(prompt, choice) for choice in choices]
        by_byte = [total / len(c.encode()) for total, c in zip(sums, choices, strict=True)]
        best, best_by_byte = sums.index(max(sums)), by_byte.index(max(by_byte))
        return _Item(float(best == right), 1.0, choices[best], float(best_by_byte == right))

    def _choice(self, prompt: Prompt, choice: str) -> float:
        texts = self._model.texts
        texts.tokenizer.encode_special_tokens = True
        added = texts.tokenizer.encode(choice, add_special_tokens=False).ids
        if len(prompt.ids) + len(added) > self._model.limit:
            raise DataError(
                f"prompt and choice have {len(prompt.ids) + len(added)} tokens, and the model "
                f"{self._model.limit} positions",
                where=prompt.where,
                remedy="leave the row out",
            )
        logps, _ = self._model.logps([*prompt.ids, *added], len(prompt.ids))
        return float(logps.double().sum())

    def _replies(self) -> list[_Item]:
        task, items = self._task, {}
        rule = RewardConfig(kind="exact_match", pattern=task.pattern, ignore_case=task.ignore_case)
        ids = [prompt.ids for prompt in self._rows]
        with Rewards([rule]) as rewards:
            for number, tokens in self._model.replies(ids, task.max_tokens):
                text = str(self._model.texts.tokenizer.decode(tokens))  # as scorers of a run do
                (value,) = rewards.rate(self._rows[number], text, tokens)
                items[number] = _Item(value, reply=text)
        return [items[number] for number in range(len(items))]


def _first_row(task: EvaluationTask, where: str) -> dict[str, Any]:
    """The first row, if it is an object. Another reader refuses what is wrong."""
    found = find_files(SourceConfig(kind="jsonl", path=task.path).at(task.place), where)
    for path, _ in found.files:
        with open_text(path) as file:
            line = next((line for line in file if line.strip()), b"")
        try:
            row = parse_json(line.strip().strip(b",").lstrip(b"["))
        except ValueError:
            row = {}
        return row if isinstance(row, dict) else {}
    return {}
