"""Promise 1 with each optimizer, under the real command: a SIGKILL changes no bit.

One worker trains undisturbed. The same run with other workers and a kill ends with the same bits.
The optimizer's class and the schedule's function lie next to the run file.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

import holdfast
from tests.support import sample_optimizers
from tests.support.commands import Outcome, apart, write_run_file
from tests.support.followed_run import assert_same_bits, run_with_a_kill

STEPS = 30
CHANGES = (
    "train.batch_size=12",
    "train.microbatch_size=2",
    f"train.steps={STEPS}",
    "train.evaluate.every=0",
    "train.optimizer.learning_rate=0.01",
    "train.schedule.kind=my_optimizers:rate",
    "checkpoint.every_steps=10",
    "cluster.threads_per_worker=1",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw",
        "sgd",
        "lion",
        "adafactor",
        "muon",
        "torch.optim.RMSprop",
        "my_optimizers:Damped",
        "my_optimizers:Scaled",
    ],
)
def test_a_kill_changes_no_bit(tmp_path: Path, optimizer: str) -> None:
    run_file = write_run_file(tmp_path)
    shutil.copy(str(sample_optimizers.__file__), tmp_path / "my_optimizers.py")
    given = [*CHANGES, f"train.optimizer.name={optimizer}"]
    alone = tmp_path / "alone"
    apart("train", run_file, f"folder={alone}", "layout.workers=1", *given, deadline=240).succeeds()
    rates = {r["learning_rate"] for r in holdfast.journal(alone) if r["kind"] == "step_done"}
    assert rates == {0.01, 0.0025}
    for workers in (2, 3):
        folder = tmp_path / f"killed{workers}"
        changes = (*given, f"folder={folder}", f"layout.workers={workers}")
        run_with_a_kill(folder, 7, "train", run_file, *changes)
        assert_same_bits(alone, folder, STEPS)


@pytest.mark.slow
def test_what_a_run_cannot_use_is_one_sentence(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    shutil.copy(str(sample_optimizers.__file__), tmp_path / "my_optimizers.py")

    def train(*given: str) -> Outcome:
        return apart("train", run_file, "train.steps=4", "layout.workers=1", *given, deadline=240)

    undeclared = train("train.optimizer.name=my_optimizers:Undeclared")
    undeclared.refuses_last("train.optimizer.name=my_optimizers:Undeclared", "state 'norm'")
    late = train("train.schedule.kind=my_optimizers:fails_late")
    late.refuses_last("fails_late(4, 4) failed: ValueError: no rate for this step")
    nothing = train("train.optimizer.groups=[{match: nrom}]")
    nothing.refuses_last("matches none of the", "the nearest names are norm.weight")


@pytest.mark.slow
def test_an_export_and_another_source(tmp_path: Path) -> None:
    run_file, own = write_run_file(tmp_path), tmp_path / "my_optimizers.py"
    shutil.copy(str(sample_optimizers.__file__), own)
    given = ["train.optimizer.name=my_optimizers:Damped", "layout.workers=1"]
    apart("train", run_file, *given, deadline=240).succeeds()
    folder = tmp_path / "run"
    dcp = apart("export", folder, "--to", tmp_path / "dcp", "--format", "dcp")
    dcp.refuses("AdamW's state, and train.optimizer.name of this run is my_optimizers:Damped")
    apart("export", folder, "--to", tmp_path / "hf").succeeds()
    own.write_text(own.read_text() + "# another line\n")
    again = apart("train", run_file, "train.steps=8", *given, deadline=240)
    again.refuses_last("this run was started with another source of train.optimizer.name")
    words = shlex.split(again.err.strip().rpartition("run of its own: ")[2])
    made = apart(*words[1:], folder=tmp_path, deadline=240).succeeds()
    assert "train.optimizer.source=" in made.err + made.out
    branch = tmp_path / words[words.index("--to") + 1]
    apart("train", branch / "run.yaml", folder=tmp_path, deadline=240).succeeds()
    assert holdfast.open_checkpoint(branch).step == 8
