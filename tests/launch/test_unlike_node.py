"""A second node whose run file differs is refused before it writes into the run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.config.load import resolve_config
from holdfast.errors import RunFolderError
from holdfast.launch import unlike_node
from holdfast.launch.unlike_node import refuse_unlike_node

RUN = "folder: r\ndevice: cpu\ndata: {folder: d}\nlayout: {workers: 2}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder in which nodes are at work."""
    stored = {"config": resolve_config(RUN, "run.yaml", []).config.model_dump(mode="json")}
    (tmp_path / "resolved.json").write_text(json.dumps(stored))
    monkeypatch.setattr(unlike_node, "read_resolved", lambda folder: stored)
    monkeypatch.setattr(unlike_node, "probe_run", lambda folder: True)
    return tmp_path


def test_both_values_are_named(folder: Path) -> None:
    other = resolve_config(RUN, "run.yaml", ["layout.reduction=fast"])
    with pytest.raises(
        RunFolderError, match=r"layout\.reduction is 'fast' here and 'tree' on the nodes at work"
    ) as found:
        refuse_unlike_node(folder, other)
    assert found.value.exit_code == 2


def test_a_nodes_own_keys_may_differ(folder: Path) -> None:
    refuse_unlike_node(folder, resolve_config(RUN, "run.yaml", ["cluster.node=b"]))


def test_a_run_without_a_trainer_may_continue_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unlike_node, "probe_run", lambda folder: False)
    refuse_unlike_node(folder, resolve_config(RUN, "run.yaml", ["layout.reduction=fast"]))
