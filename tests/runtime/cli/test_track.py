"""`holdfast track`, and how a run file with trackers is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.report.trackers import registry
from tests.runtime.cli.conftest import Trained
from tests.runtime.report.test_metrics import as_tensorboard_shows
from tests.runtime.report.trackers.test_process import rows
from tests.support.commands import apart, within


def test_a_finished_run_comes_to_two_trackers(trained: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained.folder, folder)
    done = apart("track", folder, "--to", "csv,tensorboard", "--to", "csv")
    assert done.code == 0, done.err
    assert "csv: everything is delivered: {'train': 6, 'validation': 6}" in done.err
    train = rows(folder / "trackers" / "csv" / "train.csv")
    assert [row["step"] for row in train] == ["1", "2", "3", "4", "5", "6"]
    shown = as_tensorboard_shows(folder / "tensorboard", "train/loss")
    assert [float(row["train/loss"]) for row in train] == pytest.approx([v for _, v in shown])


def test_mistakes_of_the_command(trained: Trained) -> None:
    within("track", trained.folder).refuses("the run has no trackers", "--to csv")
    within("track", trained.folder, "--to", "cvs").refuses("there is no tracker 'cvs'; use csv")
    within("track", trained.folder, "--to", "csv", "--option", "folder").refuses(
        "--option folder: an option is written NAME=VALUE"
    )
    assert not (trained.folder / "trackers").exists()


def test_a_package_that_is_missing_is_named_before_the_run_starts(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "is_installed", lambda package: False)
    new = ("train", trained.run_file, f"folder={tmp_path}/new", f"data.folder={tmp_path}/data")
    within(*new, "logging.trackers=csv,wandb").refuses(
        "logging.trackers=csv,wandb",
        "the tracker wandb needs wandb, which is not installed",
        "pip install 'holdfast[wandb]'",
    )
    within(*new, "logging.trackers=[mine.calls:Callback]").refuses("no module mine.calls")
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("logging.trackers=csv,csv", "csv is there twice"),
        ("logging.trackers=[c/v]", "'c/v' is no name of a tracker"),
        ("logging.options=csv.folder=x", "names no tracker of logging.trackers"),
        ("logging.mlflow.uri=http://me:hunter22@host", "use MLFLOW_TRACKING_USERNAME"),
        ("logging.wandb.mode=on", "online"),
    ],
)
def test_mistakes_of_the_run_file(override: str, words: str, trained: Trained) -> None:
    within("config", "show", trained.run_file, override).refuses(words)


def test_an_unknown_option_is_refused_before_the_run_starts(
    trained: Trained, tmp_path: Path
) -> None:
    within(
        "train",
        trained.run_file,
        f"folder={tmp_path}/new",
        "logging.trackers=csv",
        "logging.options=csv.foldr=x",
    ).refuses("the tracker csv has no option 'foldr'; its options: folder")
