"""Remedies of messages about checkpoints, branches and the folders of runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from re import Match
from typing import Any

import pytest

from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.bucket.recover_folder import recover_folder
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import find_newest_verified
from holdfast.config.loading.load import load_config
from holdfast.launch.run.branch import make_branch
from holdfast.launch.run.resume_checks import refuse_branch_without_state, refuse_other_shapes
from holdfast.launch.run.run_folder import refuse_old_base
from holdfast.launch.run.runs import open_run
from holdfast.machine.hardware import detect_hardware
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed
from tests.runtime.cli.remedies.of_runs import (
    RUN,
    begin_run,
    damage_first,
    damage_newest,
)


def verified(lab: Lab) -> None:
    store = FolderStore(lab.folder / lab.settings.get("folder", RUN))
    find_newest_verified(store)


def begin_rotten(lab: Lab) -> None:
    begin_run(lab)
    damage_newest(lab)
    damage_first(lab)


def start_over(lab: Lab, found: Match[str]) -> None:
    """What --fresh does: the run begins in an empty folder."""
    shutil.move(lab.folder / RUN, lab.folder / "old")
    (lab.folder / RUN).mkdir()


def begin_bucket(lab: Lab) -> None:
    begin_run(lab)
    store = FolderStore(lab.folder / RUN)
    copy_checkpoint(store, list_commits(store)[0], FolderStore(lab.folder / "bucket"))
    (lab.folder / "new").mkdir()
    lab.settings.update(bucket="bucket", fresh=False)


def recover(lab: Lab) -> None:
    (lab.folder / lab.settings["bucket"]).mkdir(exist_ok=True)
    where = f"file://{lab.folder}/{lab.settings['bucket']}"
    recover_folder(FolderStore(lab.folder / "new"), where, "ours", lab.settings["fresh"], print)


def begin_fresh_bucket(lab: Lab) -> None:
    begin_bucket(lab)
    lab.settings["fresh"] = True


def shapes(lab: Lab) -> None:
    store = FolderStore(lab.folder / RUN)
    overrides = ["model.vocab_size=300", *lab.settings["overrides"]]
    config = load_config(lab.folder / "run.yaml", overrides).config
    refuse_other_shapes(Checkpoint.open(store, list_commits(store)[0]).commit, config)


def with_run(**given: Any) -> Callable[[Lab], None]:
    return lambda lab: (begin_run(lab), lab.settings.update(given))[1]


def branch(lab: Lab) -> None:
    target = lab.folder / lab.settings["to"]
    make_branch(open_run(lab.folder / RUN), "3", target, (), detect_hardware())


def begin_lost_branch(lab: Lab) -> None:
    begin_run(lab)
    branch_at(lab, "new")
    lab.write("kept.yaml", (lab.folder / "new/run.yaml").read_bytes())
    shutil.rmtree(lab.folder / "new")
    lab.settings["file"] = "kept.yaml"


def branch_at(lab: Lab, to: str) -> None:
    lab.settings["to"] = to
    branch(lab)


def begin_fresh_branch(lab: Lab) -> None:
    begin_run(lab)
    branch_at(lab, "new")
    lab.settings.update(file="new/run.yaml", fresh=True)


def train_branch(lab: Lab) -> None:
    loaded = load_config(lab.folder / lab.settings["file"])
    fresh = lab.settings.get("fresh", False)
    refuse_branch_without_state(Path(loaded.config.run_folder), loaded, fresh)


def branch_again(lab: Lab, found: Match[str]) -> None:
    branch_at(lab, "again")
    lab.settings.update(file="again/run.yaml", fresh=False)


def old_base(lab: Lab) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(lab.folder)
        refuse_old_base(load_config(Path("conf/run.yaml"), lab.settings["overrides"]))


def begin_old_base(lab: Lab) -> None:
    lab.write("runs/a/resolved.json", "{}")
    lab.write("conf/run.yaml", "folder: runs/a\n")
    lab.settings["overrides"] = []


CASES: list[Case] = [
    case(
        "checkpoint/restore/verify.py: none of … checkpoints can be trusted",
        begin_rotten,
        verified,
        r"see why with: holdfast checkpoint verify RUN, or start over with --fresh.*",
        start_over,
    ),
    case(
        "checkpoint/bucket/recover_folder.py: holds checkpoints of another run",
        begin_bucket,
        recover,
        r"name another prefix",
        fixed(bucket="other"),
    ),
    case(
        "checkpoint/bucket/recover_folder.py: holds checkpoints of the run that is set aside (step "
        "…)",
        begin_fresh_bucket,
        recover,
        r"name another prefix",
        fixed(bucket="other"),
    ),
    case(
        "launch/run/resume_checks.py: the checkpoint of step … has … for …, and the run file's "
        "model has …",
        with_run(overrides=["model.ffn_dim=32"]),
        shapes,
        r"use the model and train.precision of the run that wrote it",
        fixed(overrides=[]),
    ),
    case(
        "launch/run/resume_checks.py: the checkpoint of step … has … movement of the weights, "
        "which layout.schedule pipemare …keeps",
        with_run(overrides=["layout.schedule=pipemare"]),
        shapes,
        r"use layout.schedule (pipedream-2bw)",
        fixed(overrides=["layout.schedule=pipedream-2bw"]),
    ),
    case(
        "launch/run/resume_checks.py: this run continues …, and --fresh would begin it at step "
        "0 | its first checkpoint is not here",
        begin_lost_branch,
        train_branch,
        r"make another branch: holdfast branch RUN --at STEP --to NEW",
        branch_again,
    ),
    case(
        "launch/run/resume_checks.py: this run continues …, and --fresh would begin it at step "
        "0 | its first checkpoint is not here",
        begin_fresh_branch,
        train_branch,
        r"make another branch: holdfast branch RUN --at STEP --to NEW",
        branch_again,
    ),
    case(
        "launch/run/branch.py: {name} stands for the run's name in the key folder, so no "
        "branch may be called so",
        with_run(to="lr{name}"),
        branch,
        r"name another folder with --to",
        fixed(to="lr"),
    ),
    case(
        "launch/run/run_folder.py: … starts at the run file's folder, so it is …, which is "
        "empty; … in the current folder is not",
        begin_old_base,
        old_base,
        r"add (folder=\S+), or move that folder",
        lambda lab, found: lab.settings["overrides"].append(found[1]),
    ),
]
