"""What `join` checks on its own machine, whatever the machine that began the run has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import join as join_module
from holdfast.launch.node.node_name import default_node_name
from tests.runtime.cli.conftest import Trained
from tests.support.commands import here


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("", "device", "cuda", ("cluster.places is 1, but this machine has 0 accelerators",)),
        ("train", "compile", True, ("train.compile needs a C++ compiler",)),
        ("logging", "trackers", ["wandb"], ("wandb",)),
    ],
)
def test_a_node_refuses_what_its_machine_cannot_do(
    section: str,
    key: str,
    value: Any,
    words: tuple[str, ...],
    trained: Trained,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(trained.folder, tmp_path / "run")
    path = tmp_path / "run/resolved.json"
    stored = json.loads(path.read_text())
    (stored["config"][section] if section else stored["config"])[key] = value
    path.write_text(json.dumps(stored))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(join_module, "finished_step", lambda *_: None)
    here(capsys, "join", tmp_path / "run", "--node", "b").refuses(*words)


def test_the_name_of_a_node_comes_from_its_owner() -> None:
    pod = {"POD_NAME": "tiny-0"}
    assert default_node_name(pod | {"SLURMD_NODENAME": "n3"}) == "n3"
    assert default_node_name(pod) == "tiny-0"
    assert default_node_name({}) != ""
    assert default_node_name({"POD_NAME": "x" * 80 + "-7"}).endswith("x-7")
    assert len(default_node_name({"POD_NAME": "x" * 80 + "-7"})) <= 63
