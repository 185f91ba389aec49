"""A run of adapters by the real commands: a worker is killed, and PEFT itself is asked.

Campaign tests. `tests/runtime/export/test_adapters.py` compares with a golden file of PEFT's
losses.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.events import StepDone, WorkerStarted
from holdfast.launch.run.runs import read_resolved
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.adapters import write_base, write_run
from tests.support.checkpoints import newest_tensors
from tests.support.commands import apart, here, start
from tests.support.followed_run import run_with_a_kill
from tests.support.nodes import QUICK, nodes_of
from tests.support.ranks import wait_until

STEPS = 60
TWO = ("cluster.min_nodes=2", "layout.workers=2")
Capture = pytest.CaptureFixture[str]
LONGER = (
    f"train.steps={STEPS}",
    "train.microbatch_size=1",
    "checkpoint.every_steps=5",
    "lora.dropout=0.1",
)


@pytest.mark.slow
def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, capsys: Capture
) -> None:
    path = write_run(tmp_path)
    here(capsys, "train", path, f"folder={tmp_path / 'alone'}", *LONGER).succeeds()
    expected = newest_tensors(tmp_path / "alone", STEPS)
    for workers in (2, 3):
        folder = tmp_path / f"killed-{workers}"
        changes = (f"folder={folder}", f"layout.workers={workers}", *LONGER)
        run_with_a_kill(folder, 22, "train", path, *changes)
        found = newest_tensors(folder, STEPS)
        assert expected.keys() == found.keys()
        assert [name for name in expected if expected[name] != found[name]] == []
        here(capsys, "data", "audit", folder).succeeds()


@pytest.mark.slow
def test_a_recovery_refuses_a_base_that_was_changed_meanwhile(
    tmp_path: Path, capsys: Capture
) -> None:
    """A worker that starts again reads the base again."""
    path = write_run(tmp_path)
    folder = tmp_path / "run"
    process = start("train", path, *LONGER, "layout.workers=1", "train.steps=100000")
    try:
        wait_until(lambda: bool(_pids(folder, 12)), 240, "some steps")
        shutil.rmtree(tmp_path / "base")
        write_base(tmp_path / "base", seed=4)
        os.kill(_pids(folder, 12)[-1], signal.SIGKILL)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 2, out + err
    assert "not those that the run was begun with" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_another_node_joins_with_the_base_at_another_place(tmp_path: Path, capsys: Capture) -> None:
    """And one whose base is another is refused, while the run waits for a second node."""
    path, copy, wrong = write_run(tmp_path), tmp_path / "elsewhere", tmp_path / "wrong"
    shutil.copytree(tmp_path / "base", copy)
    write_base(wrong, seed=4)
    here(capsys, "train", path, f"folder={tmp_path / 'alone'}", *LONGER).succeeds()
    with nodes_of(path, tmp_path / "run", *LONGER, *TWO) as nodes:
        nodes.start("a")
        nodes.wait_until(lambda: read_resolved(nodes.folder) and nodes.leader, "no leader")
        refused = apart("join", nodes.folder, *QUICK, f"lora.base={wrong}", "--node", "b")
        assert refused.code == 2, refused.err
        assert "not those that the run was begun with" in refused.err
        assert "Traceback" not in refused.err
        nodes.join("b", settings=[f"lora.base={copy}"])
        assert nodes.end() == {"a": 0, "b": 0}, nodes.said
        assert {"a", "b"} in [nodes.nodes(record.generation) for record in nodes.records()]
    expected, found = (newest_tensors(tmp_path / name, STEPS) for name in ("alone", "run"))
    assert expected == found


def _pids(folder: Path, at_step: int) -> list[int]:
    """Of the workers, once the run has come to a step."""
    records = read_journal(FolderStore(folder)) if (folder / "journal").exists() else []
    events = [record.event for record in records]
    steps = [event.step for event in events if isinstance(event, StepDone)]
    reached = max(steps, default=0) >= at_step
    return [e.pid for e in events if isinstance(e, WorkerStarted)] if reached else []


@pytest.mark.slow
def test_losses_adapters_and_folders_are_peft_s_own(tmp_path: Path, capsys: Capture) -> None:
    """The library itself, if it is installed: training, its folder as our start, ours in it."""
    pytest.importorskip("peft")
    import torch
    from benchmarks.runtime.lora_parity import our_adapter, our_losses, peft_model, train_peft

    path = write_run(tmp_path)
    ours = our_losses(path)
    losses, end = train_peft(path, tmp_path / "peft")
    assert ours == pytest.approx(losses, abs=1e-5)

    adapter, merged = our_adapter(path, tmp_path / "adapter"), tmp_path / "merged"
    assert adapter
    assert here(capsys, "export", path, "--to", merged).code == 0
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(24).reshape(2, 12) * 7 % 400
    with torch.no_grad():
        by_peft = peft_model(path, tmp_path / "adapter")(tokens).logits
        by_merged = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(by_merged, by_peft, rtol=0, atol=1e-5)

    text = path.read_text()
    section = text[text.index("lora:") : text.index("train:")]
    continued = tmp_path / "continued.yaml"
    continued.write_text(text.replace(section, f"lora: {{from: '{end}'}}\n"))
    here(capsys, "train", continued, f"folder={tmp_path / 'continued'}", "train.steps=1").succeeds()


@pytest.mark.slow
def test_transformers_own_code_begins_with_the_same_loss(tmp_path: Path, capsys: Capture) -> None:
    """A foreign model: B is zero before the first step, so the first loss is the base's. Adapters
    alone are kept there, too."""
    path = write_run(tmp_path)
    for folder, more in (("ours", ()), ("theirs", ("model.code=transformers",))):
        done = here(
            capsys, "train", path, f"folder={tmp_path / folder}", "train.steps=3", *more
        ).succeeds()
        assert "lora: trains" in done.err
    first, second = (_losses(tmp_path / folder) for folder in ("ours", "theirs"))
    assert second[0] == pytest.approx(first[0], abs=1e-5)
    assert second[2] < second[0]
    store = FolderStore(tmp_path / "theirs")
    names = [spec.name for spec in Checkpoint.open(store, list_commits(store)[0]).tensors]
    assert names
    assert all(name.endswith((".lora_A", ".lora_B")) for name in names)


def _losses(folder: Path) -> list[float]:
    events = [record.event for record in read_journal(FolderStore(folder))]
    return [event.loss for event in events if isinstance(event, StepDone)]
