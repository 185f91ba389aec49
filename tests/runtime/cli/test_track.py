"""`holdfast track`, and how a run file with trackers is refused."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.report.trackers import registry
from tests.runtime.cli.conftest import Trained
from tests.runtime.report.test_metrics import as_tensorboard_shows
from tests.runtime.report.trackers.test_process import rows
from tests.support.commands import apart, secret_file, start, within


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
    twice = ("--option", "folder=a", "--option", "folder=b")
    within("track", trained.folder, "--to", "csv", *twice).refuses("folder is there twice")
    within("track", trained.folder, "--to", "csv,tensorboard", "--option", "mode=online").refuses(
        "--option mode=online: the tracker csv has no option 'mode'"
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


@pytest.mark.parametrize(
    ("tracker", "options", "words"),
    [
        ("wandb", {"project": "team/mine"}, "use entity team and project mine"),
        *(("wandb", {"project": f"a{char}b"}, f"has {char}, which") for char in "\\#?%:"),
        ("wandb", {"project": "p" * 129}, "128 characters"),
        ("wandb", {"mode": "onlin"}, "use offline or online"),
        ("mlflow", {"mode": "online"}, "MLFLOW_TRACKING_URI has none"),
        ("mlflow", {"mode": "online", "uri": "localhost:5000"}, "http://host:5000"),
        ("mlflow", {"mode": "online", "uri": "mlruns"}, "http://host:5000"),
        ("mlflow", {"uri": "http://host:5000"}, "use mode online"),
        ("mlflow", {"experiment": "e" * 501}, "500 characters"),
        ("mlflow", {"mode": "off"}, "use offline or online"),
        ("csv", {"folder": __file__}, "is no folder"),
        ("tensorboard", {"folder": __file__}, "is no folder"),
    ],
)
def test_values_that_cannot_work_are_refused_with_their_key(
    tracker: str, options: dict[str, str], words: str
) -> None:
    kind = registry.load_tracker(tracker)
    with pytest.raises(ConfigError) as caught:
        registry.check_options(tracker, kind, options, lambda option: f"at {option}", {})
    assert str(caught.value.where).removeprefix("at ") in {*options, "uri"}
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ({"mode": "online"}, {"MLFLOW_TRACKING_URI": "https://host"}),
        ({"mode": "online", "uri": "databricks"}, {}),
        ({"mode": "online", "uri": "postgresql+psycopg2://host/base"}, {}),
        ({"mode": "online", "uri": "sqlite:///here.db"}, {"MLFLOW_TRACKING_URI": "no"}),
        ({}, {"MLFLOW_TRACKING_URI": "no"}),
    ],
)
def test_addresses_of_mlflow_that_can_work(
    options: dict[str, str], environment: dict[str, str]
) -> None:
    kind = registry.load_tracker("mlflow")
    registry.check_options("mlflow", kind, options, environment=environment)


def test_the_place_of_a_trackers_key_is_the_one_of_the_run_file(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "is_installed", lambda package: True)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    new = ("train", trained.run_file, f"folder={tmp_path}/new")
    within(*new, "logging.trackers=wandb", "logging.wandb.project=team/mine").refuses(
        "command line: logging.wandb.project=team/mine: the project", "use entity team"
    )
    within(*new, "logging.trackers=mlflow", "logging.mlflow.mode=online").refuses(
        ": logging.mlflow.uri: mode online needs an address", "MLFLOW_TRACKING_URI"
    )


# --- `holdfast stage` -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("listen", "memory", "sentence"),
    [
        ("here", "1", "holdfast: --listen: 'here' is not an address; use host:port"),
        ("127.0.0.1:0", "0", "holdfast: --memory: 0 GB keep nothing; use"),
        (
            "127.0.0.1:0",
            "1e9",
            "holdfast: --memory: 1e+09 GB are more than this machine has free; use",
        ),
        ("192.0.2.1:7600", "0.01", "holdfast: --listen: cannot listen on 192.0.2.1:7600"),
    ],
)
def test_what_is_refused(tmp_path: Path, listen: str, memory: str, sentence: str) -> None:
    secret = secret_file(tmp_path)
    within("stage", "--listen", listen, "--secret", secret, "--memory", memory).refuses(sentence)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    secret = secret_file(tmp_path)
    secret.chmod(0o644)
    done = within("stage", "--listen", "127.0.0.1:0", "--secret", secret, "--memory", "0.01")
    done.refuses("other users of this machine can read the run's secret")
    assert secret.read_text() not in done.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(tmp_path: Path, number: signal.Signals) -> None:
    secret = secret_file(tmp_path)
    with start(
        "stage", "--listen", "127.0.0.1:0", "--secret", secret, "--memory", "0.01"
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("keeping snapshots at 127.0.0.1:")
        process.send_signal(number)
        assert process.wait(120) == 0
        assert process.stderr.read() == ""
