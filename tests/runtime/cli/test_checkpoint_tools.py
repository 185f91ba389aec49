"""`holdfast checkpoint show | verify | diff | copy | prune` on a run that was really trained."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.verify import verify as problems_of
from holdfast.wire.store.location import open_store
from tests.runtime.cli.conftest import Trained
from tests.support import s3
from tests.support.commands import start, within, write_run_file


@pytest.fixture
def copy(trained: Trained, tmp_path: Path) -> Path:
    """A copy of the run folder that a test may change."""
    shutil.copytree(trained.folder, tmp_path / "run")
    return tmp_path / "run"


def rot(folder: Path, step: int) -> None:
    path = next((folder / "data").rglob(f"{step:010d}-rank00000-*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_show_says_who_wrote_what(trained: Trained) -> None:
    found = within("checkpoint", "show", trained.folder)
    assert found.code == 0, found.err
    assert "2 replicas of one rank" in found.out
    assert "model.embed.weight" in found.out
    shown = json.loads(within("checkpoint", "show", trained.run_file, "3", "--json").out)
    assert shown["step"] == 3
    assert shown["meta"]["position"] == 12
    for tensor in shown["tensors"].values():
        elements = 0
        for box in tensor["boxes"]:
            size = 1
            for length in box["lengths"]:
                size *= length
            elements += size
        assert elements * 4 == tensor["bytes"]
    within("checkpoint", "show", trained.folder, "5").refuses("no checkpoint of step 5", "3, 6")


def test_one_step_can_be_verified(copy: Path) -> None:
    rot(copy, 3)
    assert within("checkpoint", "verify", copy, "newest").code == 0
    found = within("checkpoint", "verify", copy, "3")
    assert found.code == 1
    assert "checksum does not match" in found.out
    assert within("checkpoint", "verify", copy).code == 1
    within("checkpoint", "verify", copy, "x").refuses("no checkpoint of step x")


def test_diff_says_which_tensors_differ(trained: Trained, copy: Path) -> None:
    same = within("checkpoint", "diff", trained.folder, f"{copy}@newest")
    assert "MiB" not in same.err, "it has less than one"
    assert same.code == 0, same.err
    assert same.out == ""
    assert "are the same" in same.err
    other = within("checkpoint", "diff", f"{trained.run_file}@3", f"{copy}@6", "--json")
    assert other.code == 1
    answer = json.loads(other.out)
    assert answer["same"] == 0
    assert all(row["max_abs"] > 0 for row in answer["differences"].values())
    text = within("checkpoint", "diff", f"{copy}@3", copy)
    assert "elements, by at most" in text.out
    rot(copy, 6)
    within("checkpoint", "diff", trained.folder, copy).refuses_last("checksum", "verify")
    within("checkpoint", "diff", f"{copy}@4", copy).refuses("no checkpoint of step 4")


def test_a_copy_is_a_run_that_every_command_knows(trained: Trained, tmp_path: Path) -> None:
    target = tmp_path / "backup" / "run"
    done = within("checkpoint", "copy", trained.folder, "3", "--to", target, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["there_bytes"] == 0
    assert within("checkpoint", "verify", target).code == 0
    assert within("checkpoint", "diff", f"{trained.folder}@3", target).code == 0
    assert not (target / "secret").exists()
    again = within("checkpoint", "copy", trained.folder, "3", "--to", target, "--json")
    assert json.loads(again.out)["copied_bytes"] == 0
    # The run goes on from the copy, to the same state bit for bit.
    went_on = within("train", trained.run_file, f"folder={target}")
    assert went_on.code == 0, went_on.err
    assert within("checkpoint", "diff", trained.folder, target).code == 0


def test_a_copy_in_a_bucket_is_whole(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    where = s3.location(s3.server())
    command = ("checkpoint", "copy", trained.folder, "--to", where, "--json")
    done = within(*command)
    assert done.code == 0, done.err
    store = open_store(where)
    (key,) = list_commits(store)
    assert json.loads(done.out)["key"] == key
    assert problems_of(store, key) == []
    assert json.loads(within(*command).out)["copied_bytes"] == 0
    assert "not-a-secret" not in done.out + done.err
    within("checkpoint", "copy", trained.folder, "--to", "ftp://x/y").refuses("ftp")


def test_what_is_no_place_for_a_copy_is_refused(trained: Trained, tmp_path: Path) -> None:
    command = ("checkpoint", "copy", trained.folder, "--to")
    within(*command, trained.folder).refuses("the run itself")
    (tmp_path / "file").write_text("")
    within(*command, tmp_path / "file").refuses("not a folder")
    within("checkpoint", "copy", trained.folder, "9", "--to", tmp_path / "x").refuses("step 9")


def test_prune_keeps_what_it_is_told_to(copy: Path) -> None:
    command = ("checkpoint", "prune", copy)
    nothing = within(*command, "--json")
    assert json.loads(nothing.out)["removed"] == []
    would = within(*command, "--keep-last", "1", "--dry-run")
    assert "1 checkpoints would be removed, 1 kept" in would.err
    assert "\n3 " in would.out
    assert within("checkpoint", "show", copy, "3").code == 0
    spared = within(*command, "--keep-last", "1", "--keep-every", "3", "--json")
    assert json.loads(spared.out)["removed"] == []
    gone = json.loads(within(*command, "--keep-last", "1", "--json").out)
    assert (len(gone["removed"]), len(gone["kept"]), gone["dry_run"]) == (1, 1, False)
    assert not list((copy / "data").rglob("0000000003-*"))
    assert within("checkpoint", "verify", copy).code == 0
    within(*command, "--keep-last", "0").refuses("--keep-last")


def test_a_kept_checkpoint_outlives_the_rules_until_it_is_released(copy: Path) -> None:
    prune = ("checkpoint", "prune", copy, "--keep-last", "1", "--json")
    assert within("checkpoint", "keep", f"{copy}@3").code == 0
    assert "3 (kept)" in within("checkpoint", "list", copy).out
    assert json.loads(within(*prune).succeeds().out)["removed"] == []
    within("checkpoint", "keep", f"{copy}@4").refuses("step 4")
    assert within("checkpoint", "keep", f"{copy}@3", "--release").code == 0
    assert len(json.loads(within(*prune).succeeds().out)["removed"]) == 1


def test_prune_never_removes_the_newest_that_is_whole(copy: Path) -> None:
    rot(copy, 6)
    found = within("checkpoint", "prune", copy, "--keep-last", "1", "--json")
    assert found.code == 0, found.err
    assert "passed over" in found.err
    assert json.loads(found.out)["removed"] == []
    rot(copy, 3)
    within("checkpoint", "prune", copy).refuses_last("none of 2 checkpoints can be trusted")
    assert within("checkpoint", "show", copy, "3").code == 0


def test_a_run_in_use_is_not_pruned(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    process = start("train", run_file, "train.steps=100000", "train.evaluate.every=0", "--json")
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line).get("kind") == "checkpoint_committed":
                break
        within("checkpoint", "prune", tmp_path / "run").refuses("another trainer uses")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
