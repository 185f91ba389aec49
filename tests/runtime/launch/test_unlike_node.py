"""A second node whose run file differs is refused before it writes into the run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.config.loading.load import resolve_config
from holdfast.errors import RunFolderError
from holdfast.launch.run import run_folder
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.run_folder import refuse_unlike_node

RUN = "folder: r\ndevice: cpu\ndata: {folder: d}\nlayout: {workers: 2}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder in which nodes are at work."""
    stored = {"config": resolve_config(RUN, "run.yaml", []).config.model_dump(mode="json")}
    (tmp_path / "resolved.json").write_text(json.dumps(stored))
    monkeypatch.setattr(run_folder, "read_resolved", lambda folder: stored)
    return tmp_path


class Watch(HolderWatch):
    """A watch that has its verdict."""

    def __init__(self, folder: Path, verdict: bool | None = True) -> None:
        super().__init__(folder)
        self._verdict = verdict

    def look(self) -> bool | None:
        return self._verdict


def test_both_values_are_named(folder: Path) -> None:
    other = resolve_config(RUN, "run.yaml", ["layout.reduction=fast"])
    with pytest.raises(
        RunFolderError, match=r"layout\.reduction is 'fast' here and 'tree' on the nodes at work"
    ) as found:
        refuse_unlike_node(folder, other, Watch(folder))
    assert found.value.exit_code == 2


def test_a_nodes_own_keys_may_differ(folder: Path) -> None:
    refuse_unlike_node(folder, resolve_config(RUN, "run.yaml", ["cluster.node=b"]), Watch(folder))


@pytest.mark.parametrize("verdict", [False, None])
def test_a_run_without_a_trainer_may_continue_otherwise(folder: Path, verdict: bool | None) -> None:
    other = resolve_config(RUN, "run.yaml", ["layout.reduction=fast"])
    refuse_unlike_node(folder, other, Watch(folder, verdict))
