"""Versions, the gate and its statistics, and two writers of one index."""

from __future__ import annotations

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from holdfast.evaluation.results import TaskResult
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import FolderStore
from holdfast_lab.chaos.sample_run import WORDS
from holdfast_platform.registry.gate import bootstrap
from holdfast_platform.registry.registry import State, StoreRegistry
from tests.support import s3
from tests.support.commands import Outcome, here, within, write_run_file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints that get better, and texts like those that it learns."""
    root = tmp_path_factory.mktemp("registry") / "t"
    words = ("train.steps=48", "layout.workers=1", "checkpoint.every_steps=4")
    within(
        "train",
        write_run_file(root),
        *words,
        "checkpoint.keep_last=99",
        "train.optimizer.learning_rate=0.01",
    ).succeeds()
    draw = random.Random(3)
    rows = [{"text": " ".join(draw.choices(WORDS, k=12))} for _ in range(40)]
    (root / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root / "run"


def test_a_gate_refuses_a_worse_version_and_takes_a_better_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, gate = tmp_path / "models", tmp_path / "gate.yaml"
    gate.write_text(f"tasks: [{{path: {run.parent}/texts.jsonl}}]\n")

    def call(*words: str | Path) -> Outcome:
        return here(capsys, "registry", *words)

    # A busy machine saves some steps later than it was asked to.
    saved = [row["step"] for row in json.loads(within("checkpoint", "list", run, "--json").out)]
    middle, early = (min(saved, key=lambda step: abs(step - near)) for near in (24, 8))
    for number, step in enumerate((middle, early, 48), 1):
        said = json.loads(call("add", kept, run, "--step", str(step), "--json").succeeds().out)
        assert said == {"version": number}
    call("promote", kept, "1", "--gate", gate).succeeds()
    call("promote", kept, "2", "--gate", gate).refuses_last("version 2 is not", "at 95%", code=3)
    strict = tmp_path / "strict.yaml"
    strict.write_text(f"tasks: [{{path: {run.parent}/texts.jsonl, require: better}}]\n")
    call("promote", kept, "1", "--gate", strict).succeeds()  # compared with nothing but itself
    call("rollback", kept).succeeds()
    entry = json.loads(call("promote", kept, "3", "--gate", strict, "--json").succeeds().out)
    assert (entry["replaces"], entry["gate"]["tasks"][0]["low"] > 0) == (1, True)
    call("rollback", kept).succeeds()
    listed = json.loads(call("list", kept, "--json").succeeds().out)
    assert [row["is_promoted"] for row in listed] == [True, False, False]
    call("rollback", kept).refuses("no version was promoted before")

    call("fetch", kept, "promoted", "--to", tmp_path / "model").succeeds()
    within("export", run, "--step", str(middle), "--to", tmp_path / "export").succeeds()
    for path in (tmp_path / "export").iterdir():
        assert (tmp_path / "model" / path.name).read_bytes() == path.read_bytes()


def test_what_is_no_registry_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "gate.yaml"
    gate.write_text(f"tasks: [{{path: {run.parent}/texts.jsonl}}]\n")
    broken = tmp_path / "broken"
    (broken / "index").mkdir(parents=True)
    (broken / "index/0000000000.json").write_text("[]")
    more = {"promote": ("1", "--gate", gate), "compare": ("1", "2", "--gate", gate)}
    more["fetch"] = ("1", "--to", tmp_path / "to")
    before = sorted(path for path in tmp_path.rglob("*"))
    for command in ("list", "promote", "rollback", "compare", "fetch"):
        for place, said in (
            (tmp_path / "none", "there is no registry"),
            (run, "there is no registry"),
            (gate, "gate.yaml"),
            (broken, "index/0000000000.json"),
        ):
            done = here(capsys, "registry", command, place, *more.get(command, ()))
            done.refuses(said)
    here(capsys, "registry", "add", run, run).refuses("which is no part of a registry")
    here(capsys, "registry", "add", broken, run).refuses("index/0000000000.json")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_registry_outside_of_the_regions_gets_no_byte(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, kept = tmp_path / "run", tmp_path / "models"
    shutil.copytree(run, copy)
    resolved = json.loads((copy / "resolved.json").read_text())
    resolved["config"]["governance"] = {"regions": ["eu-west-1"]}
    (copy / "resolved.json").write_text(json.dumps(resolved))
    monkeypatch.setenv("HOLDFAST_ZONE", "us-east-1a")
    here(capsys, "registry", "add", kept, copy).refuses("this machine lies in us-east-1a")
    for command in (("checkpoint", "copy"), ("branch",), ("export",)):
        here(capsys, *command, copy, "--to", kept).refuses("lies in us-east-1a")
    monkeypatch.setenv("HOLDFAST_ZONE", "eu-west-1a")
    for place in ("s3://bucket/models?region=us-east-1", "mlflow:models"):
        here(capsys, "registry", "add", place, copy).refuses("region")
    assert not kept.exists()
    model = tmp_path / "model"
    here(capsys, "export", copy, "--to", model).succeeds()
    here(capsys, "registry", "add", place, model).refuses("region")
    here(capsys, "registry", "add", kept, model).succeeds()
    monkeypatch.setenv("HOLDFAST_ZONE", "us-east-1a")
    fetched = tmp_path / "fetched"
    here(capsys, "registry", "fetch", kept, "1", "--to", fetched).succeeds()
    here(capsys, "registry", "add", tmp_path / "others", fetched).refuses("lies in us-east-1a")


@pytest.mark.parametrize(
    ("rules", "code", "said"),
    [
        ("ceiling: 0.5", 3, "and ceiling is 0.5"),
        ("floor: 0.5", 2, "for which the limit is a ceiling"),
        ("require: bettr", 2, "tasks.0.require"),
        ("margin: 0.1", 2, "no effect with require: not_worse"),
    ],
)
def test_rules_that_are_broken_or_wrong(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rules: str, code: int, said: str
) -> None:
    kept, gate = tmp_path / "models", tmp_path / "gate.yaml"
    gate.write_text(f"tasks: [{{path: {run.parent}/texts.jsonl, {rules}}}]\n")
    within("registry", "add", kept, run).succeeds()
    done = here(capsys, "registry", "promote", kept, "1", "--gate", gate)
    done.refuses_last(said, code=code)
    assert code == 3 or done.err.strip().count("\n") == 0, "nothing was evaluated"
    gate.write_text(f"max_bytes: 5\ntasks: [{{path: {run.parent}/texts.jsonl}}]\n")
    here(capsys, "registry", "promote", kept, "1", "--gate", gate).refuses_last(
        "max_bytes is 5", code=3
    )
    assert not StoreRegistry(FolderStore(kept)).state().promoted


def test_equal_models_are_called_worse_as_often_as_stated() -> None:
    draw, worse, trials = np.random.default_rng(5), 0, 200
    for trial in range(trials):
        results = [
            TaskResult("t", "d", "accuracy", True, [(float(x), 1.0) for x in draw.random(80) < 0.6])
            for _ in range(2)
        ]
        worse += bootstrap(results[0], results[1], 0.95, 1000, trial).high < 0
    assert 0.005 <= worse / trials <= 0.05  # 2.5 % at each side


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_writers_at_the_same_time_lose_no_entry(tmp_path: Path, place: str) -> None:
    where = str(tmp_path / "kept") if place == "folder" else s3.location(s3.server())
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")

    def write(number: int) -> None:
        registry = StoreRegistry(open_store(where))
        registry.add(tmp_path / "model", {"folder": str(number)})

        def decide(state: State) -> dict[str, object]:
            return {"kind": "promote", "version": number, "replaces": state.current}

        for _ in range(3):
            registry.record(decide)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, range(1, 7)))
    store = open_store(where)
    entries = [json.loads(store.get(key)) for key in store.list("index/")]
    state = StoreRegistry(store).state()
    assert sorted(v["source"]["folder"] for v in state.versions.values()) == list("123456")
    assert sorted(state.versions) == [1, 2, 3, 4, 5, 6]
    promotions = [entry for entry in entries if entry["kind"] == "promote"]
    assert len(promotions) == 18
    before = [None, *(entry["version"] for entry in promotions)]
    assert [entry["replaces"] for entry in promotions] == before[:-1]  # it has seen the last one
    StoreRegistry(store).fetch(3, tmp_path / "fetched")
    assert (tmp_path / "fetched/config.json").read_text() == "{}"
