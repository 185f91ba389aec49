"""A user's script is run as Python itself would run it, and its mistakes are named by its file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.config.loading.load import LoadedConfig, resolve_config
from holdfast.config.sections.task import SCRIPT_TASK
from holdfast.errors import HoldfastError, ScriptError, TaskError
from holdfast.launch.run import task_run
from holdfast.launch.run.task_run import describe_in
from holdfast.tasks.child import describe
from holdfast.tasks.script import Script
from holdfast.tasks.scripts.own_loop import OpenStep

TEXT = """\
import dataclasses
import torch
import holdfast

@dataclasses.dataclass
class Options:
    size: int = 3

assert dataclasses.fields(Options)[0].type is int
assert __name__ == "__main__"
model = torch.nn.Linear(Options().size, 1)
run = holdfast.run()
run.keep(model, torch.optim.SGD(model.parameters()))
data = [{"x": float(i)} for i in range(8)]
for step in run.steps(1, batch_size=4, microbatch_size=2):
    list(step.batches(data, version="1"))
"""


def of_script(folder: Path, *overrides: str) -> LoadedConfig:
    task = [f"task.name={SCRIPT_TASK}", f"task.folder={folder}", "task.args.script=own.py"]
    return resolve_config(None, "", [*task, *overrides])


def test_a_script_has_no_features_that_it_does_not_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", sys.argv)
    (tmp_path / "own.py").write_text(TEXT)
    script = Script("own.py")
    script.begin(of_script(tmp_path).config, torch.device("cpu"))
    assert script.planned_values()["train.steps"] == 1


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        (
            "raise SystemExit(4)",
            "exited with status 4, in step 1; look at it with: holdfast run own",
        ),
        ("raise SystemExit", "ended, in step 1, before the last step of the run; let the loop"),
        ("1 / 0", "ZeroDivisionError: division by zero, in step 1; look at it with"),
        ("import signal; signal.signal(15, print)", "remove the handler: a run saves and leaves"),
        ("import os; os.environ['RANK']", "KeyError: 'RANK', in step 1"),
    ],
)
def test_the_end_of_a_script_in_its_loop_is_named_by_line_step_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "own.py").write_text(TEXT.replace("    list(", f"    {inside}\n    list("))
    script = Script("own.py", ["--size", "a b"])
    script.begin(of_script(tmp_path).config, torch.device("cpu"))
    assert script.run.notes == ["not given to the script: RANK; the run deals its work"]
    with pytest.raises(ScriptError, match=r"^own\.py:16: ") as caught:
        script.give(OpenStep(1))
    assert words in str(caught.value)
    assert "--debug" not in str(caught.value) or str(caught.value).endswith("-- --size 'a b'")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TaskError("a is wrong", where="task"), "own.py: a is wrong"),
        (TaskError("a is wrong", where="own.py:3"), "own.py:3: a is wrong"),
        (None, "given by the script own.py: train.batch_size 5 is not a multiple"),
    ],
)
def test_a_mistake_in_a_script_names_its_file(
    error: TaskError | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(config: Any) -> dict[str, Any]:
        if error is not None:
            raise error
        found = dict.fromkeys(task_run.PLANNED_KEYS, 0) | {"parameters": []}
        return found | {
            "sharding": [],
            "positions": [],
            "notes": [],
            "source": "a",
            "data": "1",
            "train": {"train.batch_size": 5},
        }

    monkeypatch.setattr(task_run, "describe_task", answer)
    loaded = of_script(tmp_path, "train.microbatch_size=2")

    def begin() -> None:
        loaded.with_values(describe_in(loaded, str(tmp_path))).refuse_broken_rules()

    with pytest.raises(HoldfastError, match=said):
        begin()


def test_reading_a_scripts_batches_leaves_the_readers_process_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(TEXT)
    sizes = ("train.batch_size=4", "train.microbatch_size=2")
    config = of_script(tmp_path, *sizes).config
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        patch.setattr(sys, "argv", sys.argv)
        found = describe(config)
    planned = {key: found[key] for key in task_run.PLANNED_KEYS if key != "parameters"}
    planned["parameters"] = tuple(found["parameters"])
    config = config.model_copy(update={"task": config.task.model_copy(update=planned)})
    resolved = {"config": config.model_dump(mode="json")}
    (tmp_path / "resolved.json").write_text(json.dumps(resolved))
    before = sys.modules["__main__"], sys.argv
    assert [len(batch["x"]) for batch in holdfast.batches(tmp_path, step=1)] == [2, 2]
    assert (sys.modules["__main__"], sys.argv) == before
