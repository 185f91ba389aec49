"""Runs that begin with the weights of `model.from`: by the real commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from holdfast.events import StepDone
from holdfast.launch.run.runs import read_resolved
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.adapters import GOLDEN, write_base, write_run
from tests.support.commands import Outcome, within


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, its dataset, and a run file that trains the full model. Tests leave them."""
    folder = tmp_path_factory.mktemp("weights")
    path = write_run(folder)
    text = "".join(line for line in path.read_text().splitlines(True) if "lora" not in line)
    path.write_text(text.replace("steps: 20", "steps: 2"))
    within("data", "prepare", path).succeeds()
    return folder


@pytest.fixture(scope="module")
def begun(root: Path) -> tuple[Path, Outcome]:
    """A run of one step from a base that is lost afterwards, and what its training printed."""
    base, run = root / "lost base", root / "run of one step"
    shutil.copytree(root / "base", base)
    given = f"model.from={base}", f"folder={run}", "layout={workers: 2, dp_shard: 2}"
    done = within("train", root / "run.yaml", *given, "train.steps=1").succeeds()
    shutil.rmtree(base)
    return run, done


def _first_loss(run: Path) -> float:
    events = [record.event for record in read_journal(FolderStore(run))]
    return next(e.loss for e in events if isinstance(e, StepDone) and e.step == 1)


def test_the_first_loss_is_that_of_the_folder_s_model(
    root: Path, begun: tuple[Path, Outcome]
) -> None:
    run, done = begun
    assert f"of {root / 'lost base'} (checksum " in done.err
    assert f"from the weights of {root / 'lost base'}" in done.out
    _check_first_loss(run)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["{workers: 1}", "{pp: 2}"])
def test_the_first_loss_is_the_same_under_other_layouts(root: Path, layout: str) -> None:
    run = root / f"run {len(layout)}"
    given = f"folder={run}", "train.steps=1", f"layout={layout}"
    within("train", root / "run.yaml", *given).succeeds()
    _check_first_loss(run)


def _check_first_loss(run: Path) -> None:
    """New adapters add nothing, so the first loss of PEFT and TRL is the base's."""
    expected = json.loads(GOLDEN.read_text())
    assert expected
    for losses in expected.values():
        assert _first_loss(run) == pytest.approx(losses[0], abs=1e-5)


def test_a_run_keeps_the_weights_that_it_began_with(
    root: Path, begun: tuple[Path, Outcome], tmp_path: Path
) -> None:
    base, run = root / "lost base", tmp_path / "run"
    shutil.copytree(begun[0], run)
    given = f"model.from={base}", f"folder={run}", "layout={workers: 2, dp_shard: 2}"
    command = "train", root / "run.yaml", *given
    assert len((read_resolved(run) or {})["config"]["model"]["weights_checksum"]) == 32
    write_base(base, seed=4)
    within(*command).refuses_last("not those that the run was begun with", "model.weights")
    within(*command, "model.weights=false").refuses_last("weights_checksum was")
    moved = f"model.from={root / 'base'}"
    again = within("train", root / "run.yaml", moved, f"folder={run}").succeeds()
    assert "from the state after step 1" in again.out
    assert (run / "imported" / "config.json").is_file()


def test_the_shape_alone_is_a_key(root: Path, tmp_path: Path) -> None:
    (tmp_path / "shape").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(root / "base" / name, tmp_path / "shape" / name)
    given = f"model.from={tmp_path / 'shape'}", f"folder={tmp_path / 'run'}", "train.steps=1"
    command = "train", root / "run.yaml", *given
    within(*command).refuses_last("there is no model.safetensors here", "model.weights=false")
    assert not (tmp_path / "run").exists()
    done = within(*command, "model.weights=false").succeeds()
    assert "model.weights is false" in done.err
    assert "from initial weights" in done.out


@pytest.mark.slow
def test_a_run_that_began_with_other_weights_keeps_them(root: Path, tmp_path: Path) -> None:
    """With initial ones, as `model.from` meant once, or with those of an import."""
    run, imported = tmp_path / "run", tmp_path / "imported"
    command = "train", root / "run.yaml", "train.steps=1"
    within(*command, f"folder={run}", "model.weights=false").succeeds()
    for steps in (2, 3):
        again = within("train", root / "run.yaml", f"folder={run}", f"train.steps={steps}")
        assert "began with initial weights: those of" in again.succeeds().err
    text = ("checkpoint", "import", root / "run.yaml", "--from", root / "base")
    within(*text, f"folder={imported}").succeeds()
    done = within(*command, f"folder={imported}").succeeds()
    assert "from the weights imported from base" in done.out
    assert _first_loss(imported) == pytest.approx(
        json.loads(GOLDEN.read_text()).popitem()[1][0], abs=1e-5
    )


def test_init_writes_a_file_that_tunes_at_once(
    root: Path, begun: tuple[Path, Outcome], tmp_path: Path
) -> None:
    path, base, rows = tmp_path / "tuned.yaml", root / "base", root / "rows.jsonl"
    within("init", path, "--chat", rows).refuses("--chat", "add --from FOLDER")
    within("init", path, "--from", base, "--chat", tmp_path / "none.jsonl").refuses("no such file")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    within("init", path, "--from", base, "--chat", pairs).refuses("--preferences")
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a"}\n')
    within("init", path, "--from", base, "--chat", texts).refuses("the first row has text")
    within("init", path, "--from", base, "--chat", rows).succeeds()
    folders = f"data.folder={tmp_path / 'data'}", f"folder={tmp_path / 'run'}", "layout.workers=1"
    done = within("train", path, *folders, "train.epochs=0.5").succeeds()
    assert f"from the weights of {base}" in done.out
    assert "passes over the data" in done.err
    other = within("checkpoint", "diff", tmp_path / "run", begun[0], "--brief")
    assert other.code == 1
    assert "the run files differ: data.sequence_length 256 and 128" in other.err
    assert "tensor" not in other.out
