"""The identity of a run whose folder is lost and whose bucket an older version wrote."""

from __future__ import annotations

from pathlib import Path

from holdfast.checkpoint.save.single_writer import TensorSource, write_single
from holdfast.config.loading.identity import config_hash, earlier_hash
from holdfast.config.loading.load import resolve_config
from holdfast.config.run import RunConfig
from holdfast.launch.run.run_folder import run_hash
from holdfast.wire.store.run_store import FolderStore


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
