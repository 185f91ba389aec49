"""An own loop under the real command: killed, resized and resumed, it ends with the undisturbed
run's bits. The examples of the adapters do the same."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

import holdfast
from holdfast.events import Evaluated, StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import apart, within
from tests.support.followed_run import (
    DEADLINE,
    PLAIN,
    assert_continued_in_process,
    assert_same_bits,
    run_killed,
    run_undisturbed,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 40
FIRST = """\
import os
def first():
    try:
        os.mkdir("raised")
    except FileExistsError:
        return False
    return True


"""
MENDED = """\
import holdfast, torch
samples = [{"x": row} for row in torch.randn(64, 3, generator=torch.Generator().manual_seed(0))]
run = holdfast.run()
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters())
run.keep(model, optimizer)
for step in run.steps(12, batch_size=8, microbatch_size=4):
    for batch in step.batches(samples, version="1"):
        if BROKEN:
            raise ValueError("wrong")
        step.backward(model(batch["x"]).square().sum(), weight=len(batch["x"]))
    step.apply()
"""


def validations(folder: Path) -> list[tuple[int, float, int]]:
    """Step, loss and divisor of each validation."""
    events = [record.event for record in read_journal(FolderStore(folder))]
    found = {e.step: (e.step, e.loss, e.tokens) for e in events if isinstance(e, Evaluated)}
    return list(found.values())


def test_a_kill_in_an_own_loop_changes_no_bit(tmp_path: Path) -> None:
    script = Path(shutil.copy(EXAMPLES / "own_loop" / "train.py", tmp_path))
    steps = 20
    shorter = ("--set", f"train.steps={steps}", "--set", "train.evaluate.every=8")
    arguments = (*shorter, "--", "--hidden", "16")
    run_undisturbed(script, tmp_path / "alone", *arguments)
    found = run_killed(script, tmp_path / "killed", *arguments, workers=3, at=7)
    assert_continued_in_process(found, steps)
    assert_same_bits(tmp_path / "alone", tmp_path / "killed", steps)
    assert validations(tmp_path / "alone") == validations(tmp_path / "killed") != []
    audit = within("data", "audit", tmp_path / "killed")
    assert f"{64 * steps:,} samples in {steps} steps: none missing, none twice" in audit.out


@pytest.mark.slow
def test_an_own_loop_is_stopped_and_resumed_with_other_workers(tmp_path: Path) -> None:
    script = Path(shutil.copy(EXAMPLES / "own_loop" / "train.py", tmp_path))
    few, all_steps = "train.steps=15", f"train.steps={STEPS}"
    run_undisturbed(script, tmp_path / "alone", "--set", all_steps)
    run_undisturbed(script, tmp_path / "resumed", "--set", few, workers=2)
    run_undisturbed(script, tmp_path / "resumed", "--set", all_steps, workers=3)
    events = [record.event for record in read_journal(FolderStore(tmp_path / "resumed"))]
    done = [event.step for event in events if isinstance(event, StepDone)]
    assert done == list(range(1, STEPS + 1))
    assert_same_bits(tmp_path / "alone", tmp_path / "resumed", STEPS)
    again = apart(
        "run",
        script,
        "--folder",
        tmp_path / "resumed",
        *PLAIN,
        "--set",
        all_steps,
        deadline=DEADLINE,
    ).succeeds()
    assert "this run is finished" in again.err + again.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs"), [("hf_trainer", "accelerate"), ("lightning", "lightning")]
)
def test_an_adapters_example_is_killed_and_ends_with_the_same_bits(
    tmp_path: Path, name: str, needs: str
) -> None:
    pytest.importorskip(needs)
    script = Path(shutil.copy(EXAMPLES / name / "train.py", tmp_path))
    run_undisturbed(script, tmp_path / "alone", "--set", f"train.steps={STEPS}")
    found = run_killed(
        script, tmp_path / "killed", "--set", f"train.steps={STEPS}", workers=3, at=7
    )
    assert_continued_in_process(found, STEPS)
    assert_same_bits(tmp_path / "alone", tmp_path / "killed", STEPS)


OPTIMIZERS = """\
import torch
import torch.nn.functional as F
from torch import nn

import holdfast

data = [{"x": torch.linspace(-1, 1, 6) * (i % 7), "y": i % 3} for i in range(256)]
model = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 3))
matrices = [p for p in model.parameters() if p.dim() > 1]
vectors = [p for p in model.parameters() if p.dim() < 2]
KEPT
run = holdfast.run()
run.keep(model, kept, schedulers, clip_norm=1.0)
for step in run.steps(30, batch_size=32, microbatch_size=4):
    for batch in step.batches(data, version="1"):
        loss = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        step.backward(loss, weight=len(batch["y"]))
    step.apply()
"""
KEPT = {
    "muon and adamw": """\
kept = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]
schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 30) for one in kept]
""",
    "groups of sgd": """\
groups = [{"params": matrices, "momentum": 0.9}, {"params": vectors, "lr": 0.05}]
kept = torch.optim.SGD(groups, lr=0.1)
schedulers = torch.optim.lr_scheduler.StepLR(kept, 10)
""",
    "adafactor": """\
kept = torch.optim.Adafactor(model.parameters(), lr=0.02)
schedulers = None
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_kept_optimizers_have_the_same_bits_on_1_2_and_3_workers_with_a_kill(
    tmp_path: Path, name: str
) -> None:
    script = tmp_path / "optimizers.py"
    script.write_text(OPTIMIZERS.replace("KEPT", KEPT[name]))
    run_undisturbed(script, tmp_path / "alone")
    run_undisturbed(script, tmp_path / "two", workers=2)
    found = run_killed(script, tmp_path / "killed", workers=3, at=7)
    assert_continued_in_process(found, 30)
    assert_same_bits(tmp_path / "alone", tmp_path / "two", 30)
    assert_same_bits(tmp_path / "alone", tmp_path / "killed", 30)


FAILING = """\
import torch
from torch import nn

import holdfast

data = [{"x": torch.ones(3)}] * 8
model = nn.Linear(3, 1)
run = holdfast.run()
run.keep(model, torch.optim.AdamW(model.parameters()))
BEFORE
for step in run.steps(9, batch_size=4, microbatch_size=2):
    for batch in step.batches(data, version="1"):
        INSIDE
        step.backward(model(batch["x"]).sum(), weight=2)
    step.apply()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("marks", "line", "words"),
    [
        ({"BEFORE": "raise ValueError('no room')"}, 10, "ValueError: no room"),
        ({"BEFORE": "import sys; sys.exit('no')"}, 0, "exited with status no"),
        ({"BEFORE": "raise SystemExit"}, 0, "the script ended, and has no loop over run.steps()"),
        ({"INSIDE": "if step.number == 4: model.weigth"}, 13, "AttributeError: 'Linear' object"),
        (
            {
                "BEFORE": "import os; optimizer = run.kept.optimizers._optimizers[0]",
                "INSIDE": "optimizer.param_groups[0]['lr'] = os.getpid() * 1e-9",
            },
            0,
            "the ranks have unlike learning rates",
        ),
        (
            {
                "INSIDE": "import os; optimizer.param_groups[0]['eps'] = os.getpid() * 1e-9",
                "torch.optim.AdamW(model.parameters())": "optimizer",
                "BEFORE": "pass",
                "model = nn.Linear(3, 1)": "model = nn.Linear(3, 1)\n"
                "optimizer = torch.optim.RMSprop(model.parameters())",
            },
            0,
            "the groups of the ranks' optimizers have unlike options",
        ),
    ],
)
def test_an_error_of_the_script_ends_the_run_with_its_line(
    tmp_path: Path, marks: dict[str, str], line: int, words: str
) -> None:
    text = FAILING
    for mark, words_there in ({"BEFORE": "pass", "INSIDE": "pass"} | marks).items():
        text = text.replace(mark, words_there)
    script = tmp_path / "failing.py"
    script.write_text(text)
    found = apart("run", script, "--workers", "2", *PLAIN, folder=tmp_path, deadline=DEADLINE)
    found.refuses_last(words)
    if line:
        found.refuses_last(f"failing.py:{line}")


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "workers"), [("first()", 2), ("True", 1)])
def test_what_the_ranks_hold_is_saved_and_a_mended_script_goes_on_from_it(
    tmp_path: Path, broken: str, workers: int
) -> None:
    """One rank raises, or the only one."""
    script, text = tmp_path / "failing.py", FIRST + MENDED
    script.write_text(text.replace("BROKEN", f"step.number == 9 and {broken}"))
    settings = (*PLAIN, "--workers", str(workers), "--set", "checkpoint.every_steps=5")
    failed = apart("run", script, *settings, folder=tmp_path, deadline=DEADLINE)
    failed.refuses_last(
        "failing.py:19: ValueError: wrong, in step 9", "state after step 8 is saved"
    )
    script.write_text(text.replace("BROKEN", "False"))
    refused = apart("run", script, *settings, folder=tmp_path, deadline=DEADLINE)
    refused.refuses_last("with the new source in a run of its own: holdfast branch")
    words = shlex.split(refused.err.strip().rpartition("run of its own: ")[2])
    made = apart(*words[1:], folder=tmp_path, deadline=DEADLINE).succeeds()
    assert "after step 8 with task.source=" in made.err + made.out
    branch = tmp_path / words[-1]
    apart("train", branch / "run.yaml", folder=tmp_path, deadline=DEADLINE).succeeds()
    run_undisturbed(script, tmp_path / "alone")
    assert_same_bits(tmp_path / "alone", branch, 12)


@pytest.mark.slow
def test_an_error_after_the_loop_is_the_commands_error_and_the_run_is_finished(
    tmp_path: Path,
) -> None:
    text = FAILING.replace("BEFORE", "pass").replace("INSIDE", "pass")
    script = tmp_path / "failing.py"
    script.write_text(text + "raise OSError('no folder for the model')\n")
    found = apart("run", script, "--workers", "2", *PLAIN, folder=tmp_path, deadline=DEADLINE)
    found.refuses_last("failing.py:16: OSError: no folder for the model; the run is finished")
    for rank in (0, 1):
        assert f"worker {rank} failed after its last step (9)" in found.out
    assert holdfast.open_checkpoint(tmp_path / "runs" / "failing").step == 9
    apart("run", script, "--workers", "2", *PLAIN, folder=tmp_path, deadline=DEADLINE).succeeds()
