"""`train.epochs`: steps that follow from the data."""

from __future__ import annotations

import pytest

from holdfast.config.loading.load import resolve_config
from holdfast.errors import ConfigError
from holdfast.launch.start.data import by_epochs
from tests.runtime.cli.conftest import Trained
from tests.support.commands import within


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ("epochs: 3, batch_size: 4", 30),
        ("epochs: 0.5, batch_size: 4", 5),
        ("epochs: 1, batch_size: 16", 3),
        ("epochs: 1e-6, batch_size: 4", 1),
        ("epochs: 1, batch_size: 2, batch_warmup: [{from_step: 11, batch_size: 10}]", 12),
    ],
)
def test_the_last_step_completes_the_passes(keys: str, steps: int) -> None:
    loaded = resolve_config(f"train: {{{keys}, microbatch_size: 1}}\n", "run.yaml")
    planned = by_epochs(loaded, lambda: 40)
    assert {key: value for key, (value, _) in planned.items()} == {
        "train.steps": steps,
        "train.epochs": 0.0,
    }


def test_steps_next_to_epochs_and_unknown_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml:1.*both say how long.*remove one"):
        by_epochs(resolve_config("train: {epochs: 2, steps: 9}\n", "run.yaml"), lambda: 40)
    with pytest.raises(ConfigError, match="does not say how many samples"):
        by_epochs(resolve_config("task: a:B\ntrain: {epochs: 2}\n", "run.yaml"), lambda: 0)


def test_the_command_line_wins_over_the_other_key_of_the_file() -> None:
    steps, epochs = "train: {steps: 60, microbatch_size: 1}\n", "train: {epochs: 3}\n"
    loaded = resolve_config(steps, "run.yaml", ["train.epochs=3", "train.batch_size=4"])
    assert by_epochs(loaded, lambda: 40)["train.steps"][0] == 30
    for given in ("train.steps=60", "train={steps: 60}"):
        loaded = resolve_config(epochs, "run.yaml", [given])
        assert (loaded.config.train.steps, by_epochs(loaded, lambda: 40)) == (60, {})
    assert resolve_config(steps, "run.yaml", ["train.epochs=0"]).config.train.steps == 60
    both = resolve_config(steps, "run.yaml", ["train.epochs=3", "train.steps=9"])
    with pytest.raises(ConfigError, match=r"command line: train\.epochs=3.*both say how long"):
        by_epochs(both, lambda: 40)


def test_a_run_of_half_a_pass_is_finished_there(trained: Trained, tmp_path: object) -> None:
    path = trained.run_file.with_name("epochs.yaml")
    path.write_text(trained.run_file.read_text().replace("  steps: 6\n", "  epochs: 0.5\n"))
    done = within("train", path, f"folder={tmp_path}/run").succeeds()
    assert " 0.5" in done.err
    assert " passes over the data" in done.err
    again = within("train", path, f"folder={tmp_path}/run").succeeds()
    assert "this run is finished" in again.err
