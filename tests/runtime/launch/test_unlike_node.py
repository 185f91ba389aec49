"""A second node whose run file differs is refused before it writes into the run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.checkpoint.save.single_writer import TensorSource, write_single
from holdfast.config.loading.identity import config_hash, earlier_hash
from holdfast.config.loading.load import resolve_config
from holdfast.config.run import RunConfig
from holdfast.errors import RunFolderError
from holdfast.launch.run import run_folder
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.run_folder import refuse_unlike_node, run_hash
from holdfast.wire.store.run_store import FolderStore

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


# --- the identity of a run of which only a bucket is left -----------------------------------------
def config_with(bucket: Path, kind: str = "constant") -> RunConfig:
    settings = (f"train.schedule.kind={kind}", f"checkpoint.bucket=file://{bucket}")
    return resolve_config(None, "run.yaml", settings).config


def test_a_bucket_of_an_older_version_gives_its_run_the_identity(tmp_path: Path) -> None:
    bucket, new = tmp_path / "bucket", tmp_path / "new"
    bucket.mkdir()
    config = config_with(bucket)
    assert run_hash(new, config) == config_hash(config), "an empty bucket"
    tensor = TensorSource("a", "F32", (1,), [bytes(4)])
    identity = earlier_hash(config)
    assert identity is not None
    write_single(FolderStore(bucket), 0, 5, [tensor], {}, config_hash=identity)
    assert run_hash(new, config) == identity
    other = config.model_copy(update={"train": config.train.model_copy(update={"steps": 7})})
    assert run_hash(new, other) == config_hash(other), "no run of this bucket"
    cosine = config_with(bucket, "cosine")
    assert run_hash(new, cosine) == config_hash(cosine)
