"""lm-evaluation-harness on a checkpoint, without an export (extra `eval`)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.data.read.files import canonical_json
from holdfast.data.read.vocabulary import describe_tokenizer, tokenizer_file
from holdfast.errors import ConfigError, DataError
from holdfast.evaluation.results import TaskResult, TaskResults

if TYPE_CHECKING:
    from holdfast.evaluation.model import EvaluatedModel

MAX_NEW_TOKENS = 256  # of a reply, where a task does not say; as the harness has it


def require_harness() -> None:
    """Raises ConfigError unless lm-evaluation-harness is installed."""
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "a task that is no file of rows needs lm-evaluation-harness, which is not installed",
            where="--tasks",
            remedy="pip install 'holdfast[eval]', or name a file that ends with .jsonl",
        )


def evaluate_harness(
    model: EvaluatedModel,
    names: Sequence[str],
    include: Path | None,
    shots: int | None,
    limit: int,
    say: Callable[[str], None],
    results: TaskResults | None = None,
) -> list[TaskResult]:
    """Return the result of each task of the harness, and keep it. Raises ConfigError.

    Args:
        include: folder with more tasks.
        shots: worked examples before each row; None: as the task says.
        limit: rows that are used; 0: all.
    """
    manager = import_module("lm_eval.tasks").TaskManager(
        include_path=None if include is None else str(include)
    )
    if odd := [name for name in names if name not in manager.all_tasks]:
        raise ConfigError(
            f"lm-evaluation-harness has no task {odd[0]!r}",
            where="--tasks",
            remedy="list them with lm_eval ls tasks, or name a folder with --include",
        )
    start = time.monotonic()
    found = import_module("lm_eval").simple_evaluate(
        model=harness_model(model),
        tasks=list(names),
        num_fewshot=shots,
        limit=limit or None,
        task_manager=manager,
        bootstrap_iters=0,
    )
    seconds, done = time.monotonic() - start, []
    for task, rows in found["samples"].items():
        result = _result(task, rows, found, shots, seconds)
        if results is not None:
            results.put(result)
        say(result.line)
        done.append(result)
    return done


def harness_model(model: EvaluatedModel) -> Any:
    """Return an LM of the harness that computes with an evaluated model, one text at a time."""
    base: Any = import_module("lm_eval.api.model").TemplateLM
    utils: Any = import_module("lm_eval.utils")
    kwargs_of: Any = import_module("lm_eval.models.utils").normalize_gen_kwargs
    texts, tokenizer = model.texts, model.texts.tokenizer
    place = tokenizer_file(str(texts.data.tokenizer.place))
    end = describe_tokenizer(tokenizer, place).end_id
    prefix = end if texts.begin is None else texts.begin
    begin_text = model.text_of([prefix])

    class HoldfastLM(base):  # type: ignore[misc]
        eot_token_id, prefix_token_id = end, prefix
        tokenizer_name = str(place)

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            tokenizer.encode_special_tokens = False
            adds = add_special_tokens
            if adds is None:
                adds = not (begin_text and string.startswith(begin_text))
            return list(tokenizer.encode(string, add_special_tokens=adds).ids)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return [self._logp(before, after) for _, before, after in requests]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            return [
                sum(self._logp(*window)[0] for window in self._windows(request.args[0]))
                for request in requests
            ]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            hows = [kwargs_of(dict(request.args[1]), MAX_NEW_TOKENS) for request in requests]
            if any(how.get("do_sample") for how in hows):
                raise DataError(
                    "the task draws its replies, and Holdfast writes the likeliest ones",
                    where="--tasks",
                    remedy="set do_sample: false in the task's generation_kwargs",
                )
            found = [""] * len(hows)
            for room in {int(how["max_gen_toks"]) for how in hows}:
                these = [n for n, how in enumerate(hows) if int(how["max_gen_toks"]) == room]
                keep = -max(1, model.limit - room)
                ids = [self.tok_encode(requests[number].args[0])[keep:] for number in these]
                for place, tokens in model.replies(ids, room):
                    number = these[place]
                    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
                    for stop in filter(None, hows[number]["until"]):
                        text = text.split(stop)[0]
                    found[number] = text
            return found

        def _logp(self, before: Sequence[int], after: Sequence[int]) -> tuple[float, bool]:
            ids = [*before, *after][-(model.limit + 1) :]
            logps, is_greedy = model.logps(ids, max(1, len(ids) - len(after)))
            return float(logps.sum()), is_greedy

        def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
            ids = self.tok_encode(text)
            cut = utils.get_rolling_token_windows(ids, prefix, model.limit, 1)
            return map(utils.make_disjoint_window, cut)

    return HoldfastLM()


def _result(
    task: str,
    samples: Sequence[Mapping[str, Any]],
    found: Mapping[str, Any],
    shots: int | None,
    seconds: float,
) -> TaskResult:
    """The items of the task's first metric, and all its numbers."""
    numbers = {
        name: float(value)
        for name, value in found["results"][task].items()
        if "," in name and isinstance(value, int | float) and "_stderr" not in name
    }
    metric, _, kind = next(iter(numbers)).partition(",")
    rows = sorted((s for s in samples if s["filter"] == kind), key=lambda row: row["doc_id"])
    values = [row[metric] for row in rows]
    better = bool(found["higher_is_better"][task].get(metric, True))
    if any(isinstance(value, list | tuple) for value in values):  # (log-likelihood, its unit)
        items, metric, better = [(-float(a), float(b)) for a, b in values], f"nats_{metric}", False
    else:
        items = [(float(value), 1.0) for value in values]
    answers = [row["filtered_resps"][0] for row in rows]
    replies = answers if all(isinstance(each, str) for each in answers) else ()
    hashes = [[row["doc_hash"], row["prompt_hash"], row["target_hash"]] for row in rows]
    digest = hashlib.sha256(canonical_json([task, shots, metric, hashes])).hexdigest()[:12]
    plain = {name.replace(",none", ""): value for name, value in numbers.items()}
    return TaskResult(task, digest, metric, better, items, replies, plain, seconds)
