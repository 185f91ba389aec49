"""`holdfast pipeline`: checks before the start, what runs again and why, kills at any moment."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import holdfast
from holdfast_lab.chaos.sample_run import WORDS
from holdfast_platform.pipeline.file import KEYS, read_pipeline
from holdfast_platform.pipeline.stages import KINDS
from tests.support.borders import unknown_entries
from tests.support.commands import apart, here, start, write_run_file

KILLS = int(os.environ.get("HOLDFAST_PIPELINE_KILLS", "4"))
DEADLINE_S = 600.0
COUNT = """\
import json, os, sys
total = sum(os.path.getsize(os.path.join(d, f)) for d, _, fs in os.walk(sys.argv[1]) for f in fs)
json.dump({"bytes": total}, open(sys.argv[2], "w"))
"""
SEARCH = {"run": "run.yaml", "trials": 2, "set": {"train.steps": 6, "layout.workers": 1}}
STAGES: dict[str, Any] = {
    "final": {"kind": "export", "run": "${tuned.run}"},
    "data": {"kind": "prepare", "run": "run.yaml"},
    "base": {"kind": "train", "run": "run.yaml", "set": {"data.folder": "${data.dataset}"}},
    "model": {"kind": "export", "run": "${base.run}"},
    "tune_data": {"kind": "prepare", "run": "tune.yaml", "from": "${model.model}"},
    "tuned": {
        "kind": "tune",
        "run": "tune.yaml",
        "from": "${model.model}",
        "set": {"data.folder": "${tune_data.dataset}"},
    },
    "size": {
        "kind": "command",
        "command": ["python3", "count.py", "${final.model}", "${out.size}"],
        "inputs": ["count.py"],
        "outputs": {"size": "report"},
    },
}
EVERY_KIND = STAGES | {
    "best": {"kind": "search", "search": "search.yaml"},
    "scores": {"kind": "evaluate", "model": "${best.run}", "tasks": ["rows.jsonl"]},
    "promoted": {
        "kind": "gate",
        "model": "${final.model}",
        "registry": "models",
        "rules": "gate.yaml",
    },
}


def write_pipeline(root: Path, stages: dict[str, Any], **keys: Any) -> Path:
    """A pipeline file next to a tiny run file, and one that begins with a model."""
    if not (root / "run.yaml").exists():
        run = yaml.safe_load(write_run_file(root).read_text())
        del run["model"], run["data"]["tokenizer"]
        (root / "tune.yaml").write_text(yaml.safe_dump(run))
        (root / "count.py").write_text(COUNT)
        space = {"train.optimizer.learning_rate": [1e-3, 1e-2]}
        (root / "search.yaml").write_text(json.dumps({**SEARCH, "space": space}))
        (root / "gate.yaml").write_text("tasks: [{path: rows.jsonl}]")
        rows = [{"text": " ".join(WORDS[n : n + 6])} for n in range(len(WORDS) - 6)]
        (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = root / "pipeline.yaml"
    path.write_text(json.dumps({"folder": "stages", **keys, "stages": stages}, indent=1))
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pipeline") / "root"
    write_pipeline(root, {})
    return root


TRAIN = {"kind": "train", "run": "run.yaml"}
MODEL = {"kind": "export", "run": "${base.run}"}
SIZE = STAGES["size"]
REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"base": {**TRAIN, "set": {"train.stepz": 3}}}, ("train.stepz", "config schema")),
    ({"base": {**TRAIN, "set": {"train.steps": -3}}}, ("train.steps", "-3")),
    ({"base": {**TRAIN, "set": {"folder": "x"}}}, ("sets folder",)),
    ({"base": {**TRAIN, "set": {"train.steps": "${data.dataset}"}}}, ("no such stage",)),
    ({"base": {**TRAIN, "run": "other.yaml"}}, ("no such run file",)),
    ({"base": {**TRAIN, "kind": "trane"}}, ("'trane'", "train")),
    ({"base": {**TRAIN, "steps": 3}}, ("'steps'", "pipeline.yaml:")),
    ({"Base": TRAIN}, ("'Base'", "small letters")),
    ({"base": TRAIN, "model": {**MODEL, "run": "runs/x"}}, ("no reference", "${STAGE.run}")),
    ({"base": TRAIN, "model": {**MODEL, "run": "${base.model}"}}, ("base.model", "${base.run}")),
    ({"base": TRAIN, "model": {**MODEL, "dtype": "int3"}}, ("int3", "bfloat16")),
    (
        {"data": {"kind": "prepare", "run": "run.yaml"}, "m": {**MODEL, "run": "${data.dataset}"}},
        ("takes a run", "is a dataset"),
    ),
    ({"base": {**TRAIN, "set": {"data.folder": "${base.run}"}}}, ("takes a dataset",)),
    (
        {
            "base": {**TRAIN, "from": "${model.model}"},
            "model": {"kind": "export", "run": "${base.run}"},
        },
        ("in a circle",),
    ),
    ({"base": {"kind": "tune", "run": "run.yaml"}}, ("no from",)),
    ({"size": {**SIZE, "outputs": {"size": "reports"}}}, ("'reports'", "report")),
    ({"size": {**SIZE, "inputs": ["none.py"]}}, ("none.py",)),
    ({"size": {**SIZE, "command": "python3 x"}}, ("no list of words",)),
    ({"size": {**SIZE, "command": ["echo", "${out.sise}"]}}, ("out.sise", "${out.size}")),
]


@pytest.mark.parametrize(("stages", "words"), REFUSED, ids=[words[0] for _, words in REFUSED])
def test_what_cannot_work_is_refused_before_the_start(
    root: Path, stages: dict[str, Any], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    here(capsys, "pipeline", "run", write_pipeline(root, stages)).refuses(*words)
    assert not (root / "stages").exists()


def test_keys_that_no_list_has_are_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here(capsys, "pipeline", "run", root / "none.yaml").refuses("none.yaml", "no such file")
    for name, value in unknown_entries(KEYS).items():
        file = write_pipeline(root, {"base": TRAIN}, **{name: value})
        here(capsys, "pipeline", "show", file).refuses(name)
    for kind, row in KINDS.items():
        for name, value in unknown_entries(row.keys, 2).items():
            file = write_pipeline(root, {"one": {"kind": kind, name: value}})
            here(capsys, "pipeline", "show", file).refuses(name)


def rows(capsys: pytest.CaptureFixture[str], file: Path) -> dict[str, dict[str, Any]]:
    shown = here(capsys, "pipeline", "show", file, "--json").succeeds()
    return {row["stage"]: row for row in json.loads(shown.out)}


def test_a_stage_runs_again_only_for_what_decides_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prepare and two commands: no trainer is needed to see what runs."""
    root = tmp_path / "root"
    copy = {
        "kind": "command",
        "command": ["python3", "-c", "import sys; open(sys.argv[1], 'w').write('{}')", "${out.x}"],
        "outputs": {"x": "report"},
    }
    after = {**copy, "command": [*copy["command"], "${one.x}", "${data.dataset}"]}
    stages = {"data": STAGES["data"], "one": copy, "two": after}
    file = write_pipeline(root, stages)
    refused = here(capsys, "pipeline", "run", file, "--only", "two")
    refused.refuses_last("stage two waits for one", "--only one")
    here(capsys, "pipeline", "run", file).succeeds()
    assert all(row["is_done"] and row["starts"] == 1 for row in rows(capsys, file).values())
    here(capsys, "pipeline", "run", file).succeeds()
    assert all(row["starts"] == 1 for row in rows(capsys, file).values())

    stages["one"] = {**copy, "command": [*copy["command"], "unused"]}
    file = write_pipeline(root, stages)
    found = rows(capsys, file)
    assert "command changed" in found["one"]["why"]
    assert found["two"]["why"] == "waits for one"
    here(capsys, "pipeline", "run", file).succeeds()
    found = rows(capsys, file)
    assert found["two"]["starts"] == 1, "equal bytes of an input cause no further work"

    stages["data"] = {**STAGES["data"], "set": {"data.sequence_length": 8, "layout.workers": 1}}
    assert (
        "data.sequence_length: 16 -> 8" in rows(capsys, write_pipeline(root, stages))["data"]["why"]
    )
    stages["data"] = {**STAGES["data"], "set": {"layout.workers": 1}}
    assert rows(capsys, write_pipeline(root, stages))["data"]["is_done"]
    (root / "texts/0.txt").write_text("another text")
    found = rows(capsys, write_pipeline(root, stages))
    assert "bytes of data.sources.0.path changed" in found["data"]["why"]


@pytest.mark.parametrize(
    ("code", "ends"), [(1, 1), (2, 2), (3, 3), (4, 4), (75, 75), ("kill", 137)], ids=str
)
def test_the_exit_code_of_a_stage_is_passed_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int | str, ends: int
) -> None:
    body = f"sys.exit({code})" if code != "kill" else "os.kill(os.getpid(), 9)"
    words = ["python3", "-c", f"import os, sys; {body}"]
    stage = {"kind": "command", "command": words, "outputs": {"x": "report"}}
    file = write_pipeline(tmp_path / "root", {"one": stage})
    assert here(capsys, "pipeline", "run", file).code == ends
    assert rows(capsys, file)["one"]["why"] == f"its last start ended with exit code {ends}"


def test_hours_of_all_commands_are_limited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    words = ["python3", "-c", "import sys; open(sys.argv[1], 'w').write('{}')", "${out.x}"]
    one = {"kind": "command", "command": words, "outputs": {"x": "report"}}
    stages = {"one": one, "two": {**one, "command": [*words, "${one.x}"]}}
    file = write_pipeline(root, stages, max_hours=1e-6)
    spent = here(capsys, "pipeline", "run", file)
    spent.refuses_last("max_hours is 1e-06", "raise max_hours", code=4)
    assert [row["is_done"] for row in rows(capsys, file).values()] == [True, False]
    here(capsys, "pipeline", "run", write_pipeline(root, stages, max_hours=1)).succeeds()


@pytest.mark.slow
def test_a_pipeline_that_is_asked_to_leave_says_so_and_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = 400
    train = {**TRAIN, "set": {"train.steps": steps, "train.evaluate.every": steps}}
    file = write_pipeline(tmp_path / "root", {"base": train})
    process = start("pipeline", "run", file)
    deadline = time.monotonic() + DEADLINE_S
    while not list(file.parent.glob("stages/base/*/run/commits/*")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.terminate()
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 75, out + err
    assert "exit code 75" in rows(capsys, file)["base"]["why"]
    apart("pipeline", "run", file, deadline=DEADLINE_S).succeeds()
    (run,) = file.parent.glob("stages/base/*/run")
    done = [r["step"] for r in holdfast.journal(run) if r["kind"] == "step_done"]
    assert done == list(range(1, steps + 1)), "no step was done twice"


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes at work for stages below a folder: commands, and all that they have started."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in " ".join(process.cmdline()):
                found |= {each.pid: each for each in [process, *process.children(recursive=True)]}
    return list(found.values())


@pytest.fixture
def stages_end_here(tmp_path: Path) -> Iterator[None]:
    yield
    for process in processes_of(tmp_path):
        with suppress(psutil.Error):
            process.kill()


def run_with_kills(file: Path, kills: int, draw: random.Random) -> list[str]:
    """Run a pipeline again and again until it is done. Kill processes at random moments of stages
    that are drawn first, so that no stage is too late for a kill. Return what was killed."""
    names = [stage.name for stage in read_pipeline(file).stages]
    targets = sorted(draw.choices(range(len(names)), k=kills))
    killed: list[str] = []
    deadline = time.monotonic() + DEADLINE_S
    folder = file.parent / "stages"
    while True:
        process = start("pipeline", "run", file)
        while process.poll() is None:
            assert time.monotonic() < deadline, killed
            left = names[targets[len(killed)] :] if len(killed) < kills else []
            with suppress(Exception):
                process.communicate(timeout=0.1)
            if process.poll() is not None or not any((folder / name).exists() for name in left):
                continue
            stage = next(name for name in reversed(names) if (folder / name).exists())
            time.sleep(draw.uniform(0, 1 if stage == names[-1] else 3))
            if process.poll() is not None:
                continue
            at_work = processes_of(folder)
            chosen = draw.choice(at_work) if at_work and draw.random() < 0.7 else process
            with suppress(psutil.Error):
                words = " ".join(psutil.Process(chosen.pid).cmdline())
                chosen.kill()
                killed.append(f"{stage}: {words.replace(str(folder), '')[:90]}")
                deadline = time.monotonic() + DEADLINE_S  # of the wait for the next one
        if process.returncode == 0:
            return killed
        assert process.returncode in (1, 75, 128 + signal.SIGKILL, -signal.SIGKILL), (
            process.returncode,
            process.communicate(),
            killed,
        )


@pytest.mark.slow
@pytest.mark.usefixtures("stages_end_here")
def test_kills_at_random_moments_leave_the_artefacts_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pipeline, agents, workers and movers are killed. The other folder has the same paths'
    lengths but another name, so equal digests also show that no path gets into an artefact."""
    pytest.importorskip("optuna", reason="pip install 'holdfast[search]'")
    calm = write_pipeline(tmp_path / "calm", EVERY_KIND)
    apart("pipeline", "run", calm, deadline=DEADLINE_S).succeeds()
    hard = write_pipeline(tmp_path / "hard", EVERY_KIND)
    seed = int(os.environ.get("HOLDFAST_PIPELINE_SEED", "1"))
    killed = run_with_kills(hard, KILLS, random.Random(seed))
    assert len(killed) == KILLS, killed
    expected, found = rows(capsys, calm), rows(capsys, hard)
    for stage, row in found.items():
        assert row["is_done"], stage
        digests = {name: result["digest"] for name, result in row["results"].items()}
        there = {name: result["digest"] for name, result in expected[stage]["results"].items()}
        assert digests == there, stage
    starts = {name: row["starts"] for name, row in found.items()}
    print("killed:", *killed, f"starts: {starts}", sep="\n")


_ACCEPTED = {
    "kubeflow": """
from kfp.components import load_component_from_file
found = load_component_from_file(FILE)
tasks = found.pipeline_spec.root.dag.tasks
needs = {name: sorted(task.dependent_tasks) for name, task in tasks.items()}
mounts = found.platform_spec.platforms["kubernetes"].deployment_spec.executors
assert set(mounts) == {"exec-" + name for name in tasks}, mounts
retries = {task.retry_policy.max_retry_count for task in tasks.values()}
""",
    "airflow": """
from airflow.dag_processing.dagbag import DagBag
bag = DagBag(FILE)
assert not bag.import_errors, bag.import_errors
(dag,) = bag.dags.values()
needs = {task.task_id.replace("_", "-"): sorted(task.upstream_task_ids) for task in dag.tasks}
needs = {name: [other.replace("_", "-") for other in each] for name, each in needs.items()}
retries = {task.retries for task in dag.tasks}
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("to", _ACCEPTED)
def test_the_real_library_accepts_a_compiled_pipeline(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    """HOLDFAST_KUBEFLOW_PYTHON and HOLDFAST_AIRFLOW_PYTHON name interpreters that have them."""
    variable = f"HOLDFAST_{to.upper()}_PYTHON"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no interpreter with the library")
    file, out = write_pipeline(root, EVERY_KIND), tmp_path / "compiled.py"
    more = ("--image", "img", "--claim", "runs:/work") if to == "kubeflow" else ()
    here(capsys, "pipeline", "compile", file, "--to", to, "--out", out, *more).succeeds()
    code = f"import json\nFILE = {str(out)!r}{_ACCEPTED[to]}print(json.dumps([needs, *retries]))"
    done = subprocess.run(
        [os.environ[variable], "-c", code],
        env=os.environ | {"AIRFLOW_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    needs, retries = json.loads(done.stdout.strip().split("\n")[-1])
    assert needs == {
        "data": [],
        "base": ["data"],
        "model": ["base"],
        "tune-data": ["model"],
        "tuned": ["model", "tune-data"],
        "final": ["tuned"],
        "size": ["final"],
        "best": [],
        "scores": ["best"],
        "promoted": ["final"],
    }
    assert retries == 5


def test_a_workflow_has_the_stages_in_order(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_pipeline(root, STAGES)
    printed = here(capsys, "pipeline", "compile", file, "--to", "github").succeeds()
    (job,) = yaml.safe_load(printed.out)["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "name" in step]
    names = [command.split(" --only ")[1] for command in commands]
    assert names == ["data", "base", "model", "tune_data", "tuned", "final", "size"]
    here(capsys, "pipeline", "compile", file, "--to", "argo").refuses("'argo'", "airflow")
    here(capsys, "pipeline", "compile", file, "--to", "kubeflow").refuses("--image")
    given = ("--to", "airflow", "--claim", "a:/b")
    here(capsys, "pipeline", "compile", file, *given).refuses("--claim", "--to airflow")
