"""Tasks from files of rows, on a run and on its export; what is kept, shown and refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config.sections.evaluate import EvaluationTask
from holdfast.evaluation.model import open_model
from holdfast.evaluation.tasks import evaluate_tasks
from holdfast.export.texts import open_folder
from holdfast.tasks.transformers.huggingface_export import OpenCausalLM
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import here, within, write_run_file

TEXTS = ("the quick brown fox", "lazy dogs", "over rain " * 20)
ROWS: dict[str, list[dict[str, Any]]] = {
    "asked": [{"prompt": f"the {w} ", "answer": "x", "skill": w} for w in ("fox", "rain")],
    "choices": [
        {"prompt": f"the {w}", "choices": [" fox", " rain", " ove"], "answer": i}
        for i, w in enumerate(("quick", "lazy", "brown"))
    ],
    "texts": [{"text": text} for text in TEXTS],
}


def write_rows(folder: Path) -> list[str]:
    """Write the files. Return the words that name them."""
    folder.mkdir(exist_ok=True)
    words: list[str] = []
    for name, rows in ROWS.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words += ["--tasks", str(path)]
    return words


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and its export."""
    root = tmp_path_factory.mktemp("tasks") / "t"
    within("train", write_run_file(root), "layout.workers=1").succeeds()
    within("export", root / "run", "--to", root / "model").succeeds()
    return root / "run", root / "model"


def test_scores_are_those_of_the_logits(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = folders
    words, to = write_rows(tmp_path), tmp_path / "scores.json"
    of_run = json.loads(here(capsys, "evaluate", run, *words, "--json").succeeds().out)
    here(capsys, "evaluate", model, *words, "--to", to).succeeds()
    asked, choices, texts = json.loads(to.read_text())
    for there, one in zip(of_run, (asked, choices, texts), strict=True):
        assert there["score"] == pytest.approx(one["score"], rel=1e-6)

    opened: Any = open_folder(model)
    opened.tokenizer.encode_special_tokens = True
    begin = [] if opened.begin is None else [opened.begin]

    def losses(text: str, added: str = "") -> torch.Tensor:
        """Of each token but the first; of those of `added` if there is such a text."""
        ids = begin + opened.tokenizer.encode(text, add_special_tokens=False).ids
        more = opened.tokenizer.encode(added, add_special_tokens=False).ids
        logits = opened.model(torch.tensor([ids + more]))[0, :-1].log_softmax(-1)
        chosen = torch.tensor((ids + more)[1:])
        return -logits.gather(1, chosen[:, None])[len(ids) - 1 if more else 0 :, 0]

    with torch.no_grad():
        short = [losses(text) for text in TEXTS[:2]]
        assert [row[0] for row in texts["items"][:2]] == pytest.approx(
            [float(s.sum()) for s in short]
        )
        assert [row[1] for row in texts["items"][:2]] == [len(s) for s in short]
        best = [
            min(row["choices"], key=lambda c: float(losses(row["prompt"], c).sum()))
            for row in ROWS["choices"]
        ]
    assert choices["replies"] == best
    right = [
        float(row["choices"][row["answer"]] == b)
        for row, b in zip(ROWS["choices"], best, strict=True)
    ]
    assert [row[0] for row in choices["items"]] == right
    assert texts["metrics"]["perplexity"] == pytest.approx(math.exp(texts["score"]))
    assert set(asked["metrics"]) == set()
    assert asked["replies"][0] == opened.continue_text("the fox ", _greedy(64))


def _greedy(tokens: int) -> Any:
    from holdfast.export.texts import Sampling

    return Sampling(tokens, temperature=0)


@pytest.mark.slow
def test_a_model_of_transformers_gets_the_same(folders: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_rows(tmp_path)
    tasks = [EvaluationTask(path=str(tmp_path / f"{name}.jsonl"), max_tokens=9) for name in ROWS]
    ours = open_model(folders[1], None, None, print)
    theirs = open_model(folders[1], None, None, print)
    theirs.texts.model = OpenCausalLM(AutoModelForCausalLM.from_pretrained(folders[1]))
    for one, other in zip(*(evaluate_tasks(m, tasks, print) for m in (ours, theirs)), strict=True):
        assert one.score == pytest.approx(other.score, rel=1e-6)
        assert one.replies == other.replies


def test_results_are_kept_once_and_a_late_one_costs_the_run_no_time(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = folders
    rows = tmp_path / "again.jsonl"
    rows.write_text(json.dumps({"text": "lazy dogs"}) + "\n")
    before = json.loads(here(capsys, "report", run, "--json").succeeds().out)
    for _ in range(2):
        here(capsys, "evaluate", run, "--tasks", rows).succeeds()
    after = json.loads(here(capsys, "report", run, "--json").succeeds().out)
    assert after["wall_seconds"] == before["wall_seconds"]
    found = [task for task in after["tasks"] if task["task"] == "again"]
    assert [(task["step"], task["metric"]) for task in found] == [(6, "nats_per_token")]
    records = [r for r in read_journal(FolderStore(run)) if r.event.kind == "task_evaluated"]
    assert sum(getattr(r.event, "task", "") == "again" for r in records) == 1


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a b c"}) + "\n")
    for to in (tmp_path / "none" / "scores.json", tmp_path, path, Path("/proc/x")):
        here(capsys, "evaluate", folders[1], "--tasks", path, "--to", to).refuses("--to")


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        ([{"prompt": "a"}], [], "has no 'answer'"),
        ([{"prompt": "a", "answer": 7, "choices": [" b"]}], [], "none of the 1 choices"),
        ([{"prompt": "a", "answer": 0, "choices": "b"}], [], "no list of texts"),
        ([{"text": ""}], [], "is empty"),
        ([{"prompt": "a", "answer": "b"}], ["--shots", "1"], "--shots has no effect"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rows: list[dict[str, Any]],
    words: list[str],
    said: str,
) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    here(capsys, "evaluate", folders[1], "--tasks", path, *words).refuses_last(said)
