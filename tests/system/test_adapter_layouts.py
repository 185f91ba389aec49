"""Adapters under tensor and pipeline axes, by the real commands. A worker is killed, a run moves to
another layout, and each layout exports the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast.events import StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.adapters import write_run
from tests.support.checkpoints import newest_tensors
from tests.support.commands import here
from tests.support.followed_run import run_with_a_kill

STEPS, KILL, LATER = 40, 12, 50
SETTINGS = (
    f"train.steps={STEPS}",
    "train.microbatch_size=1",
    "train.precision=float64",
    "train.optimizer.clip_norm=0.05",
    "checkpoint.every_steps=5",
    "lora.dropout=0.1",
    "lora.targets=all-linear",
)
LAYOUTS = {"tp2": ("layout.tp=2",), "pp2": ("layout.pp=2",), "both": ("layout.tp=2", "layout.pp=2")}
Capture = pytest.CaptureFixture[str]


def _losses(folder: Path) -> dict[int, str]:
    """To the last bit. A step that was done twice must have the same."""
    found: dict[int, str] = {}
    for record in read_journal(FolderStore(folder)):
        if isinstance(record.event, StepDone):
            loss = record.event.loss.hex()
            assert found.setdefault(record.event.step, loss) == loss
    return found


def _assert_near(one: Path, other: Path, step: int) -> None:
    losses = [[float.fromhex(x) for _, x in sorted(_losses(f).items())] for f in (one, other)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-10)
    expected, found = (newest_tensors(folder, step) for folder in (one, other))
    assert expected.keys() == found.keys()
    for name, held in expected.items():
        want, have = np.frombuffer(held), np.frombuffer(found[name])
        assert np.linalg.norm(have - want) <= 1e-10 * np.linalg.norm(want), name


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_killed_run_of_a_layout_has_its_bits_and_moves_to_another(
    tmp_path: Path, capsys: Capture, name: str
) -> None:
    path, layout = write_run(tmp_path), LAYOUTS[name]
    alone, calm, killed = (tmp_path / each for each in ("alone", "calm", "killed"))
    here(capsys, "train", path, f"folder={alone}", *SETTINGS).succeeds()
    here(capsys, "train", path, f"folder={calm}", *SETTINGS, *layout).succeeds()
    _assert_near(alone, calm, STEPS)
    run_with_a_kill(killed, KILL, "train", path, f"folder={killed}", *SETTINGS, *layout)
    assert newest_tensors(killed, STEPS) == newest_tensors(calm, STEPS)
    assert _losses(killed) == _losses(calm)
    assert len(_losses(calm)) == STEPS
    others = [settings for other, settings in LAYOUTS.items() if other != name]
    for number, other in enumerate([*others, ()], 1):
        more = f"train.steps={STEPS + 5 * number}"
        for folder, settings in ((alone, ()), (killed, other)):
            here(capsys, "train", path, f"folder={folder}", *SETTINGS, more, *settings).succeeds()
    _assert_near(alone, killed, STEPS + 15)
    here(capsys, "data", "audit", killed).succeeds()


@pytest.mark.slow
def test_each_layout_begins_with_a_folder_s_adapters_and_exports_their_bytes(
    tmp_path: Path, capsys: Capture
) -> None:
    """The rate is so small that no element changes."""
    path = write_run(tmp_path)
    given, still = tmp_path / "given", ("train.optimizer.learning_rate=1e-300", "train.steps=3")
    exact = ("train.precision=float64", *still, "lora.dropout=0.5")
    here(capsys, "train", path, "train.steps=3").succeeds()
    here(capsys, "export", path, "--to", given, "--format", "peft").succeeds()
    text = path.read_text()
    section = text[text.index("lora:") : text.index("train:")]
    path.write_text(text.replace(section, f"lora: {{from: '{given}'}}\n"))
    found = set()
    for name, layout in ({"one": ()} | LAYOUTS).items():
        folder, to = tmp_path / f"run-{name}", tmp_path / f"to-{name}"
        here(capsys, "train", path, f"folder={folder}", *exact, *layout).succeeds()
        here(capsys, "export", folder, "--to", to, "--format", "peft").succeeds()
        held = (to / "adapter_model.safetensors").read_bytes()
        header = 8 + int.from_bytes(held[:8], "little")  # with the run's id
        found.add((held[header:], (to / "adapter_config.json").read_text()))
    assert len(found) == 1
