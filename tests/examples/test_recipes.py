"""The recipes of examples/README.md. Each trains, loses a worker on the way, and ends with the bits
of an undisturbed run. The campaign runs them; here their files are read."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.config.loading.load import load_config
from tests.support.adapters import write_base

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "notebook" / "holdfast.ipynb"
DEADLINE = 900  # seconds for a recipe on a busy machine
ASKED, ANSWER = "What happens if a worker dies?", "The remaining workers continue in the same step."


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A copy, because recipes write into folders next to the examples."""
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))


def run(*words: str | Path, folder: Path) -> str:
    """Run a Python program to its end; return what it and its commands print."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def assert_killed_and_equal(said: str) -> None:
    assert re.search(r"^step \d+: killed worker \d$", said, re.MULTILINE), said
    assert re.search(r"^all \d+ tensors are the same$", said, re.MULTILINE), said
    assert "steps are the same, too" in said


# --- what make test looks at --------------------------------------------------------------------
def test_a_chat_recipe_has_run_files_and_rows(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    folder = EXAMPLES / "fine_tune"
    for name, rank in (("full.yaml", 0), ("lora.yaml", 32)):
        config = load_config(folder / name, [f"model.from={tmp_path / 'base'}"]).config
        assert config.lora.rank == rank
        assert config.data.sources[0].rows == "messages"
        assert Path(str(config.data.sources[0].place)) == folder / "chat.jsonl"
    rows = [json.loads(line)["messages"] for line in (folder / "chat.jsonl").open()]
    assert [[m["role"] for m in row] for row in rows] == [["user", "assistant"]] * len(rows)
    assert [ASKED, ANSWER] in [[m["content"] for m in row] for row in rows]


def load_task(folder: str) -> holdfast.Task:
    """The task of the run file in a folder, as a worker imports it."""
    path = EXAMPLES / folder
    task = load_config(path / "run.yaml").config.task
    module_name, _, class_name = task.name.partition(":")
    spec = importlib.util.spec_from_file_location(module_name, path / f"{module_name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: holdfast.Task = getattr(module, class_name)(**task.args)
    return made


def test_the_digits_task_fits_its_run_file() -> None:
    task = load_task("digits")
    batch = {"image": torch.zeros(3, 1, 8, 8), "digit": torch.tensor([1, 2, 3])}
    model = task.model()
    assert task.loss(model, batch).requires_grad
    assert int(task.loss(model.eval(), batch)) >= 2  # one answer for three equal images
    merged = {task.merge(name) for name, _ in model.named_buffers()}
    assert merged == {"mean", "sum"}


def test_the_own_model_fits_its_run_file() -> None:
    task = load_task("own_model")
    data = task.data()
    assert data is not None
    assert task.loss(task.model(), task.collate([data[0], data[1]])).requires_grad


@pytest.mark.parametrize(
    "name", sorted(str(p.relative_to(EXAMPLES)) for p in EXAMPLES.rglob("*.py"))
)
def test_a_script_says_what_it_does(name: str) -> None:
    tree = ast.parse((EXAMPLES / name).read_text())
    assert ast.get_docstring(tree)


def test_the_notebook_has_no_outputs_and_its_cells_are_python() -> None:
    book = json.loads(NOTEBOOK.read_text())
    assert (book["nbformat"], len({cell["id"] for cell in book["cells"]})) == (
        4,
        len(book["cells"]),
    )
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            source = "".join(cell["source"])
            if not source.startswith("%%writefile run.yaml"):
                ast.parse(re.sub(r"^%%writefile .*", "", source))


def test_every_recipe_is_in_the_table() -> None:
    table = (EXAMPLES / "README.md").read_text()
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    folders -= {"__pycache__", "clusters"}
    assert [name for name in sorted(folders) if f"]({name})" not in table] == []


# --- the campaign -------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--lora",)], ids=["full", "lora"])
def test_fine_tuning(examples: Path, arguments: tuple[str, ...]) -> None:
    said = run("examples/fine_tune/run.py", *arguments, folder=examples.parent)
    assert_killed_and_equal(said)
    before, after = said.split("$ holdfast train", 1)
    assert ANSWER not in before.split("$ holdfast generate")[1]
    assert f"\n{ANSWER}\n" in after
    first, last = re.findall(r"too: (\S+) \.\.\. (\S+)", said)[0]
    assert float(last) < 0.1 < 5 < float(first)
    runs = examples.parent / "runs"
    if arguments:
        assert (runs / "chat-lora-exported" / "adapter_config.json").is_file()
    answers(runs / ("chat-lora-merged" if arguments else "chat-full-exported"))


@pytest.mark.slow
def test_preferences(examples: Path) -> None:
    said = run("examples/prefer/run.py", folder=examples.parent)
    assert_killed_and_equal(said)
    assert "are computed before the first step" in said
    assert "are stored: " in said, "the second run reads what the first has computed"
    assert re.findall(r"preferred in (\d+)% of the pairs", said) == ["0", "100"]
    assert (examples.parent / "runs" / "prefer-exported" / "model.safetensors").is_file()


def answers(folder: Path) -> None:
    """The exported folder in transformers itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": ASKED}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(asked, return_tensors="pt", add_special_tokens=False)
    out = model.generate(**ids, max_new_tokens=30, do_sample=False)
    text = tokenizer.decode(out[0][ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text == ANSWER


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["speech", "images"])
def test_read_media(examples: Path, kind: str) -> None:
    if kind == "images":
        pytest.importorskip("PIL")
    said = run("examples/read_media/run.py", kind, folder=examples.parent)
    assert_killed_and_equal(said)
    assert "none missing, none twice" in said


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "samples"), [("speech", 27), ("images", 24)])
def test_speech_and_images(examples: Path, kind: str, samples: int) -> None:
    """The export's logits are those of the checkpoint's parameters."""
    pytest.importorskip("PIL" if kind == "images" else "transformers")
    said = run("examples/speech_and_images/run.py", kind, folder=examples.parent)
    assert_killed_and_equal(said)
    right, of = re.findall(r"is right about (\d+) of (\d+) samples", said)[0]
    assert int(of) == samples
    assert int(right) > 0.8 * samples
    import transformers

    from holdfast.tasks import families

    runs, data = examples.parent / "runs", examples.parent / "datasets" / kind
    task_class = families.Speech if kind == "speech" else families.VisionLanguage
    task = task_class(str(data / "model"), str(data / "validation"))
    parameters = holdfast.open_checkpoint(runs / f"{kind}-undisturbed").parameters()
    ours = task.with_values({name: torch.as_tensor(p) for name, p in parameters.items()}).eval()
    theirs = getattr(transformers, task.auto).from_pretrained(runs / f"{kind}-exported")
    samples_of = task.data()
    batch = dict(task.collate([samples_of[index] for index in range(4)]))
    del batch["labels"]
    with torch.no_grad():
        assert torch.equal(ours(**batch).logits, theirs(**batch).logits)


@pytest.mark.slow
def test_digits(examples: Path) -> None:
    pytest.importorskip("sklearn")
    said = run("examples/digits/run.py", folder=examples.parent)
    assert_killed_and_equal(said)
    right = [float(found) for found in re.findall(r"(\S+)% of held-out digits are right", said)]
    assert len(right) == 5
    assert right[-1] > 97


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "needs"),
    [
        (("train", "examples/own_model/run.yaml"), "torch"),
        (("run", "examples/own_loop/train.py", "--workers", "2"), "torch"),
        (("run", "examples/hf_trainer/train.py", "--workers", "2"), "accelerate"),
        (("run", "examples/lightning/train.py", "--workers", "2"), "lightning"),
    ],
    ids=["own_model", "own_loop", "hf_trainer", "lightning"],
)
def test_a_run_that_is_killed_once(examples: Path, words: tuple[str, ...], needs: str) -> None:
    pytest.importorskip(needs)
    said = run("examples/kill_once.py", *words, folder=examples.parent)
    assert_killed_and_equal(said)


CELLS = """\
import asyncio, json, sys
from pathlib import Path


async def kernel():  # a notebook's kernel runs an event loop
    names = {"__name__": "__main__"}
    for cell in json.loads(Path(sys.argv[1]).read_text())["cells"]:
        source = "".join(cell["source"])
        head, _, rest = source.partition("\\n")
        if head.startswith("%%writefile "):
            Path(head.split()[1]).write_text(rest)
        elif cell["cell_type"] == "code":
            exec(compile(source, cell["id"], "exec"), names)


asyncio.run(kernel())
"""


@pytest.mark.slow
def test_the_notebooks_cells_in_order(tmp_path: Path) -> None:
    said = run("-c", CELLS, NOTEBOOK, folder=tmp_path)
    assert re.search(r"^step \d+: killed worker 1$", said, re.MULTILINE), said
    (same, tensors), *_ = re.findall(r"(\d+) of (\d+) tensors are the same", said)
    assert same == tensors != "0"
    assert "worker_lost SIGKILL" in said
    assert int(re.findall(r"(\d+)% of 300 new points are right", said)[0]) > 90


@pytest.mark.slow
def test_three_sites_train_with_flower_and_one_leaves_and_returns(
    examples: Path, tmp_path: Path
) -> None:
    """HOLDFAST_FLOWER_PYTHON names an interpreter that has flwr, transformers and Holdfast."""
    if "HOLDFAST_FLOWER_PYTHON" not in os.environ:
        pytest.skip("HOLDFAST_FLOWER_PYTHON names no interpreter with flwr")
    work = tmp_path / "work"
    done = subprocess.run(
        [os.environ["HOLDFAST_FLOWER_PYTHON"], "run.py", "--work", work],
        cwd=examples / "federated",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found = json.loads((work / "report.json").read_text())
    loss, sites = found["loss"], found["sites"]
    assert loss["central"] < loss["start"]
    assert loss["federated"] < loss["start"]
    assert abs(loss["federated"] - loss["central"]) < 0.5 * (loss["start"] - loss["central"])
    assert sites["B"]["missed"] >= 1
    assert sites["B"]["merged"] >= 2, "before it was lost, and after it returned"
    assert sites["A"]["missed"] == sites["C"]["missed"] == 0
    assert sites["B"]["backlog"] == 1, "the round that it began and never sent"
    assert found["rounds"][0]["lost_and_resumed"] >= 1
    assert found["sync_success"] < 1
