"""A sealed run folder: no byte of the state lies open in it, and it is never half sealed."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.bucket.recover_folder import recover_folder
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.verify import verify
from holdfast.checkpoint.save.writer import SaveContext, try_commit
from holdfast.config.loading.load import load_config
from holdfast.config.run import RunConfig
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.doctor.store import check_folder
from holdfast.errors import CheckpointError, ConfigError, RunFolderError
from holdfast.launch.run.runs import RESOLVED_FILE
from holdfast.launch.run.sealing import EMPTY, seal_copies, seal_folder
from holdfast.wire.store.folder_seal import SEAL_FILE
from holdfast.wire.store.location import SEAL_KEY_VARIABLE, open_store
from holdfast.wire.store.run_location import store_of_run
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import create_generation, open_term
from tests.support.mover_process import topology, write_noise

TABLE = (TensorSpec("model.embed.weight", "F32", (370, 8), 0),)
WINDOW = 16


def key_file(folder: Path, name: str = "seal.key") -> Path:
    path = folder / name
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return path


def config(seal: str | Path, *more: str) -> RunConfig:
    return load_config(None, [f"checkpoint.seal={seal or EMPTY}", *more]).config


def save(store: RunStore) -> str:
    plan = SaveContext(1, topology(1, 2, 1), TABLE, "c", "d", extent_bytes=1024)
    create_generation(store, 1, {})
    for rank in range(2):
        write_noise(store, plan, 5, rank, seed=5)
    commit = try_commit(store, plan, 5)
    assert commit is not None
    return commit.key


def begun(folder: Path, seal: str | Path = "") -> str:
    """A run folder with a checkpoint."""
    seal_folder(folder, config(seal))
    folder.mkdir(exist_ok=True)
    (folder / RESOLVED_FILE).write_text("{}")
    return save(store_of_run(folder))


def test_no_byte_of_the_state_lies_open_and_each_flip_is_noticed(tmp_path: Path) -> None:
    plain, sealed = tmp_path / "plain", tmp_path / "sealed"
    key = begun(plain)
    assert begun(sealed, key_file(tmp_path)) == key
    blob = b"".join(path.read_bytes() for path in sorted(plain.glob("data/*/*")))
    commit = (plain / key).read_bytes()
    windows = {
        part[start : start + WINDOW]
        for part in (blob, commit)
        for start in range(0, len(part) - WINDOW, WINDOW)
    }
    windows -= {bytes(WINDOW), b" " * WINDOW}  # padding
    found = {}
    for folder in (plain, sealed):
        files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
        found[folder] = sum(any(window in file for file in files) for window in windows)
    assert (found[plain], found[sealed]) == (len(windows), 0)
    assert len(windows) > 370  # both ranks hold the same noise
    store = store_of_run(sealed)
    assert verify(store, key) == []
    for path in sorted([*sealed.glob("data/*/*"), *sealed.glob("parts/*/*"), sealed / key]):
        good = path.read_bytes()
        for at in (0, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            assert verify(store_of_run(sealed), key), (path, at)
        path.write_bytes(good)
    assert verify(store_of_run(sealed), key) == []


def test_the_folder_opens_with_its_key_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, key = tmp_path / "run", key_file(tmp_path)
    begun(folder, key)
    good, other = key.read_text(), secrets.token_hex(32)
    key.write_text(other)
    with pytest.raises(RunFolderError, match=r"sealed with another key than that of .*seal\.key"):
        store_of_run(folder)
    with pytest.raises(RunFolderError, match=r"another key than that of checkpoint\.seal"):
        seal_folder(folder, config(key))
    key.unlink()
    with pytest.raises(RunFolderError, match=r"their key cannot be read.*HOLDFAST_SEAL_KEY$"):
        store_of_run(folder)
    assert any(c.state == "fails" for c in check_folder(folder, 0).checks if c.name == "seal")
    monkeypatch.setenv(SEAL_KEY_VARIABLE, good)
    assert len(list_commits(store_of_run(folder))) == 1
    monkeypatch.delenv(SEAL_KEY_VARIABLE)
    moved = tmp_path / "moved.key"
    moved.write_text(good)
    moved.chmod(0o600)
    seal_folder(folder, config(moved))
    assert [verify(store_of_run(folder), k) for k in list_commits(store_of_run(folder))] == [[]]
    (seal,) = [c for c in check_folder(folder, 0).checks if c.name == "seal"]
    assert "are sealed" in seal.found
    (folder / SEAL_FILE).write_text("[]")
    with pytest.raises(RunFolderError, match="does not say which key"):
        store_of_run(folder)


def test_a_run_is_never_half_sealed(tmp_path: Path) -> None:
    plain, sealed, key = tmp_path / "plain", tmp_path / "sealed", key_file(tmp_path)
    first = begun(plain)
    with pytest.raises(RunFolderError, match=r"are not sealed.*holdfast branch .*seal=.*seal\.key"):
        seal_folder(plain, config(key))
    begun(sealed, key)
    with pytest.raises(RunFolderError, match=r"are sealed, and checkpoint\.seal is empty"):
        seal_folder(sealed, config(""))
    with pytest.raises(CheckpointError, match="and those here are not; name another folder"):
        seal_copies(sealed, store_of_run(plain), plain)
    with pytest.raises(CheckpointError, match="add seal= with"):
        seal_copies(sealed, open_store(f"file://{tmp_path}/c"), f"file://{tmp_path}/c")
    copied = tmp_path / "copied"
    copied.mkdir()
    seal_copies(sealed, store_of_run(copied), copied)
    copy_checkpoint(store_of_run(sealed), first, store_of_run(copied))
    assert verify(store_of_run(copied), first) == []
    blobs = [b"".join(p.read_bytes() for p in f.glob("data/*/*")) for f in (plain, copied)]
    assert blobs[0][-WINDOW:] not in blobs[1]
    for where in (f"checkpoint.fallback={plain}", "checkpoint.bucket=s3://b/p?region=x"):
        with pytest.raises(ConfigError, match=r"would not be; use .*[?&]seal="):
            config(key, where)
    with pytest.raises(ConfigError, match="option seal=env of its address"):
        config("env", "folder=s3://b/p")


def test_a_bucket_and_a_term_of_a_sealed_run(tmp_path: Path) -> None:
    folder, key = tmp_path / "run", key_file(tmp_path)
    first = begun(folder, key)
    bucket = f"file://{tmp_path}/bucket?seal={key_file(tmp_path, 'bucket.key')}"
    copy_checkpoint(store_of_run(folder), first, open_store(bucket))
    lost = tmp_path / "lost"
    seal_folder(lost, config(key))
    recover_folder(store_of_run(lost), bucket, "c", False, lambda line: None)
    assert verify(store_of_run(lost), first) == []
    term = open_term(store_of_run(folder), "127.0.0.1:1", lambda: None)
    term.show_life()
    assert list(folder.glob("terms/*")), "a term's signs of life are appended in a sealed folder"
