"""lm-evaluation-harness on a checkpoint gets what its own backend gets on the export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import within, write_run_file

pytestmark = pytest.mark.slow

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs")
TASKS = {
    "choices": """\
output_type: multiple_choice
doc_to_text: prompt
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "replies": """\
output_type: generate_until
doc_to_text: prompt
doc_to_target: answer
generation_kwargs: {until: ["zz"], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
""",
    "texts": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}
"""All that is likelihoods, replies or losses."""


def write_tasks(folder: Path) -> None:
    rows = [
        {
            "prompt": f"{WORDS[i % 8]} {WORDS[(3 * i) % 7]}",
            "choices": [f" {WORDS[(i + k) % 8]}" for k in (1, 2, 5)],
            "answer": i % 3,
            "text": " ".join(WORDS[(i * k) % 8] for k in range(3 + 9 * (i % 4))),
        }
        for i in range(16)
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {path}}}}}\n"
        (folder / f"{name}.yaml").write_text(f"task: own_{name}\n{data}test_split: test\n{text}")


def test_the_scores_are_those_of_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness: Any = pytest.importorskip("lm_eval", reason="needs the extra eval")
    tasks: Any = pytest.importorskip("lm_eval.tasks")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    within("train", write_run_file(tmp_path / "t"), "layout.workers=1").succeeds()
    run, model = tmp_path / "t/run", tmp_path / "model"
    write_tasks(tmp_path)
    within("export", run, "--to", model).succeeds()
    names = [f"own_{name}" for name in TASKS]
    words = [word for name in names for word in ("--tasks", name)]
    ours = within("evaluate", run, "--include", tmp_path, *words, "--json").succeeds()
    theirs = harness.simple_evaluate(
        model="hf",
        model_args=f"pretrained={model},dtype=float32",
        tasks=names,
        batch_size=1,
        device="cpu",
        task_manager=tasks.TaskManager(include_path=str(tmp_path)),
        bootstrap_iters=0,
    )
    for result in json.loads(ours.out):
        found = theirs["results"][result["task"]]
        assert result["metrics"]
        for name, value in result["metrics"].items():
            assert value == pytest.approx(found[f"{name},none"], rel=1e-6, abs=1e-6), name

    def rows(task: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What is kept of a task, and the rows of the harness."""
        kept = json.loads(next((run / "evaluations").rglob(f"{task}-*.json")).read_text())
        return kept, sorted(theirs["samples"][task], key=lambda row: row["doc_id"])

    kept, samples = rows("own_texts")
    for (value, _), row in zip(kept["items"], samples, strict=True):
        assert -value == pytest.approx(row["word_perplexity"][0], rel=1e-6)
    kept, samples = rows("own_replies")
    assert kept["replies"] == [row["filtered_resps"][0] for row in samples]
    assert len(set(kept["replies"])) > 1
