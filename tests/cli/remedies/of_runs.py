"""Remedies of messages about runs: their folders, checkpoints, branches, exports and reports.

An attempt is a command, called in this process so that its error can be caught.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from re import Match
from typing import Any

import pytest
import typer

from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.cli.doctor_run import folder_of
from holdfast.cli.main import COMMANDS
from holdfast.config.load import load_config
from holdfast.launch.process_limits import memory_need, refuse_low_limits
from holdfast.launch.resume_checks import (
    ensure_end_is_intact,
    refuse_branch_without_state,
    refuse_unfit_state,
)
from holdfast.launch.run_folder import refuse_foreign, refuse_other, write_description
from holdfast.plan.hardware import detect_hardware
from holdfast.wire.store.run_store import FolderStore
from tests.cli.remedies.lab import Case, Lab, case, fixed, setting

RUN = "run"


def run_command(line: list[str]) -> None:
    """Run a command; its UserError comes out."""
    command = typer.main.get_command(import_module(f"holdfast.cli.{COMMANDS[line[0]][0]}").app)
    with command.make_context(f"holdfast {line[0]}", line[1:]) as context:
        assert command.invoke(context) in (0, None)


def begin_run(lab: Lab) -> None:
    """Begin in a folder with a finished run; its checkpoints are of steps 3 and 6."""
    trained = lab.trained
    shutil.copytree(trained, lab.folder / RUN)
    shutil.copy(trained.parent / "run.yaml", lab.folder / "run.yaml")


def line(text: str, *changes: Callable[[Lab], object]) -> Callable[[Lab], None]:
    """Begin with a run, some changes, and a command line."""

    def begin(lab: Lab) -> None:
        begin_run(lab)
        for change in changes:
            change(lab)
        lab.settings["line"] = shlex.split(text.format(root=lab.folder))

    return begin


def attempt(lab: Lab) -> None:
    run_command(lab.settings["line"])


def replace(old: str, new: str = "{0}") -> Callable[[Lab, Match[str]], None]:
    """Write another word on the line; `{0}` is what the remedy names."""

    def mend(lab: Lab, found: Match[str]) -> None:
        word = new.format(*found.groups())
        words = [word if one == old else one for one in lab.settings["line"]]
        assert words != lab.settings["line"], f"there is no {old}"
        lab.settings["line"] = words

    return mend


def add(text: str = "{0}") -> Callable[[Lab, Match[str]], None]:
    def mend(lab: Lab, found: Match[str]) -> None:
        lab.settings["line"] += shlex.split(text.format(*found.groups()))

    return mend


def leave_out(*words: str) -> Callable[[Lab, Match[str]], None]:
    def mend(lab: Lab, found: Match[str]) -> None:
        lab.settings["line"] = [one for one in lab.settings["line"] if one not in words]

    return mend


def type_command(lab: Lab, found: Match[str]) -> None:
    """Type the command that the remedy names, and nothing else afterwards."""
    lab.settings["line"] = shlex.split(found[1])[1:]


def first(lab: Lab, found: Match[str]) -> None:
    """Type the command that the remedy names, and then the line again."""
    words = shlex.split(found[1])
    if words[0] == "mkdir":
        Path(words[-1]).mkdir(parents=True)
        return
    run_command(words[1:])


def change_file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Lab], None]:
    def begin(lab: Lab) -> None:
        path = next((lab.folder / RUN).glob(name))
        lab.good[str(path)] = path.read_bytes()
        path.write_bytes(change(path.read_bytes()))

    return begin


def restore_backup(lab: Lab, found: Match[str]) -> None:
    for path, content in lab.good.items():
        Path(path).write_bytes(content)


def remove_commits(steps: str) -> Callable[[Lab], None]:
    def begin(lab: Lab) -> None:
        for path in (lab.folder / RUN / "commits").glob(steps):
            path.unlink()

    return begin


def train_again(lab: Lab, found: Match[str]) -> None:
    """Train the run: what that leaves is the finished run."""
    shutil.rmtree(lab.folder / RUN)
    shutil.copytree(lab.trained, lab.folder / RUN)


def flip(content: bytes) -> bytes:
    return content[:-100] + bytes([content[-100] ^ 0xFF]) + content[-99:]


damage_newest = change_file("data/*/0000000006-rank00000-*", flip)
damage_first = change_file("data/*/0000000003-rank00000-*", flip)


# --- checks of a folder ---------------------------------------------------------------------
def folder_check(check: Callable[[Path, Any], object]) -> Callable[[Lab], None]:
    def look(lab: Lab) -> None:
        overrides = [f"folder={lab.folder / lab.settings['folder']}", *lab.settings["overrides"]]
        check(lab.folder / lab.settings["folder"], load_config(lab.folder / "run.yaml", overrides))

    return look


def at_folder(folder: str, *overrides: str, change: Callable[[Lab], object] | None = None) -> Any:
    def begin(lab: Lab) -> None:
        begin_run(lab)
        lab.settings.update(folder=folder, overrides=list(overrides))
        if change is not None:
            change(lab)

    return begin


def describe(folder: Path, loaded: Any) -> None:
    write_description(folder, loaded, detect_hardware(), folder, "version")


def check_version(folder: Path, loaded: Any) -> None:
    refuse_other(folder, loaded, loaded.config.data.folder)


def override(lab: Lab, found: Match[str]) -> None:
    lab.settings["overrides"].append(found[1])


def start_over(lab: Lab, found: Match[str]) -> None:
    """What --fresh does: the old folder goes aside."""
    (lab.folder / RUN).rename(lab.folder / "old")


def begin_branch(lab: Lab) -> None:
    begin_run(lab)
    run_command(["branch", lab.path(RUN), "--at", "3", "--to", lab.path("new")])
    shutil.move(lab.folder / "new", lab.folder / "moved")


def train_branch(lab: Lab) -> None:
    loaded = load_config(lab.folder / "moved/run.yaml", lab.settings.get("overrides", []))
    refuse_branch_without_state(Path(loaded.config.run_folder), loaded, fresh=False)


def check_end(lab: Lab) -> None:
    if "line" in lab.settings:
        attempt(lab)
    else:
        ensure_end_is_intact(lab.folder / RUN, 6, "", print)


# --- copies ---------------------------------------------------------------------------------
def other_run(lab: Lab) -> None:
    """A folder with checkpoints of another run."""
    shutil.copytree(lab.folder / RUN, lab.folder / "other")
    store = FolderStore(lab.folder / "made")
    copy_checkpoint(
        FolderStore(lab.folder / RUN),
        list_commits(FolderStore(lab.folder / RUN))[0],
        store,
        config_hash="another",
    )


def limits(lab: Lab) -> None:
    config = load_config(lab.folder / "run.yaml").config
    refuse_low_limits(config, 2, lab.settings["files"], lab.settings["memory"])


def low(**settings: int) -> Callable[[Lab], None]:
    def begin(lab: Lab) -> None:
        begin_run(lab)
        lab.settings.update({"files": 4096, "memory": 1 << 40, **settings})

    return begin


def enough_memory(lab: Lab, found: Match[str]) -> None:
    config = load_config(lab.folder / "run.yaml").config
    lab.settings["memory"] = memory_need(config, 2).of_node


def begin_address_space(lab: Lab) -> None:
    low()(lab)
    lab.settings["limit"] = resource.getrlimit(resource.RLIMIT_DATA)


def attempt_address_space(lab: Lab) -> None:
    """A limit that only the check sees: a real one would end this process."""
    with pytest.MonkeyPatch.context() as patch:
        if "limit" in lab.settings:
            patch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
        limits(lab)


SHOW, B, L, F, C, E = (
    "checkpoint/restore/inspect.py: ",
    "launch/branch.py: ",
    "launch/branch_config.py: ",
    "launch/run_folder.py: ",
    "checkpoint/bucket/copy.py: ",
    "export/weights.py: ",
)
TO = r"name another folder with --to"
ANOTHER = r"choose another with folder=\.\.\., or .*"
BRANCH = "branch {root}/run --at 3 --to {root}/new"

CASES: list[Case] = [
    case(
        SHOW + "there is no checkpoint here",
        line("checkpoint show {root}/run", remove_commits("*")),
        attempt,
        r"train the run first",
        train_again,
    ),
    case(
        SHOW + "there is no checkpoint of step …",
        line("checkpoint show {root}/run 4"),
        attempt,
        r"name 'newest' or one of these: (\d+).*",
        replace("4"),
    ),
    case(
        "cli/checkpoint_tools.py: this is the run itself",
        line("checkpoint copy {root}/run --to {root}/run"),
        attempt,
        r"name another folder",
        lambda lab, found: _set_to(lab, "new"),
    ),
    case(
        "cli/checkpoint_tools.py: this is not a folder",
        line("checkpoint copy {root}/run --to {root}/run.yaml"),
        attempt,
        r"name another one",
        lambda lab, found: _set_to(lab, "new"),
    ),
    case(
        C + "holds checkpoints of another run (…)",
        line("checkpoint copy {root}/run --to {root}/made", other_run),
        attempt,
        r"name a new folder",
        lambda lab, found: _set_to(lab, "new"),
    ),
    case(
        C + "the checkpoint is not whole: …",
        line("checkpoint copy {root}/run 6 --to {root}/new", damage_newest),
        attempt,
        r"copy another step; see which are intact with: holdfast checkpoint verify RUN",
        replace("6", "3"),
    ),
    case(
        E + "there is no whole checkpoint of step …",
        line("export {root}/run --to {root}/hf --step 4"),
        attempt,
        r"there are: (\d+).*",
        replace("4"),
    ),
    case(
        E + "this run has no checkpoint yet",
        line("export {root}/run --to {root}/hf", remove_commits("*")),
        attempt,
        r"train it first",
        train_again,
    ),
    case(
        E + "the run was not trained on chat data with a template",
        line("generate {root}/run the --tokens 1 --chat"),
        attempt,
        r"leave out (--chat)",
        leave_out("--chat"),
    ),
    case(
        "model/new_folder.py: this is not an empty folder",
        line("export {root}/run --to {root}/run"),
        attempt,
        r"name a new one",
        lambda lab, found: _set_to(lab, "hf"),
    ),
    case(
        B + "this exists, and a branch begins in a folder of its own",
        line("branch {root}/run --at 3 --to {root}/run.yaml"),
        attempt,
        TO,
        lambda lab, found: _set_to(lab, "new"),
    ),
    case(
        B + "this lies in the run that it continues, …",
        line("branch {root}/run --at 3 --to {root}/run/in"),
        attempt,
        r"name a folder outside of it with --to",
        lambda lab, found: _set_to(lab, "new"),
    ),
    case(
        B + "(_make_folder)",
        line("branch {root}/run --at 3 --to {root}/run.yaml/new"),
        attempt,
        TO,
        lambda lab, found: _set_to(lab, "new"),
    ),
    case(
        B + "there is no checkpoint of step ……; there are those of: …",
        line("branch {root}/run --at 4 --to {root}/new"),
        attempt,
        r"name one of these steps with --at, or (newest)",
        replace("4", "3"),
    ),
    case(
        B + "the checkpoint of step … cannot be copied: …",
        line("branch {root}/run --at 6 --to {root}/new train.steps=9", damage_newest),
        attempt,
        r"see which are intact with: (holdfast checkpoint verify \S+)",
        replace("6", "3"),
    ),
    case(
        L + "holdfast branch sets … itself",
        line(BRANCH + " folder=x"),
        attempt,
        r"name it with --to",
        leave_out("folder=x"),
    ),
    case(
        L + "holdfast branch sets … itself",
        line(BRANCH + " branch_of=x@1"),
        attempt,
        r"leave it out",
        leave_out("branch_of=x@1"),
    ),
    case(
        L + "… cannot change in a branch: no checkpoint of … fits another value",
        line(BRANCH + " seed=9"),
        attempt,
        r"leave it out, or begin another run: holdfast train RUN.yaml folder=NEW",
        leave_out("seed=9"),
    ),
    case(
        L + "train.steps … leaves no step after step …",
        line("branch {root}/run --at 6 --to {root}/new"),
        attempt,
        r"add (train\.steps=\d+), or branch at an earlier step",
        add(),
    ),
    case(
        L + "train.steps … leaves no step after step …",
        line("branch {root}/run --at 6 --to {root}/new"),
        attempt,
        r"add train\.steps=\d+, or branch at an earlier step",
        replace("6", "3"),
    ),
    case(
        L + "the samples of the steps up to … were dealt in other batches (step …: … samples)",
        line(BRANCH + " train.batch_size=8"),
        attempt,
        r"use (train\.batch_size=\d+ '?train\.batch_warmup=.*)",
        add(),
    ),
    case(
        L + "checkpoint.bucket … holds the checkpoints of …",
        line(BRANCH, lambda lab: _give_bucket(lab)),
        attempt,
        r"give the branch a prefix of its own, or none: (\S+) or checkpoint.bucket=''",
        add(),
    ),
    case(
        "cli/branch.py: this is a bucket, not a run folder",
        line("branch s3://b/run --at 3 --to {root}/new"),
        attempt,
        r"name the run folder: its checkpoint.bucket is asked, too",
        lambda lab, found: lab.settings["line"].__setitem__(1, lab.path(RUN)),
    ),
    case(
        "launch/resume_checks.py: this branch lies in … now, and its run file names the folder "
        "where it was made",
        begin_branch,
        train_branch,
        r"add '?(folder=[^']+)'?",
        lambda lab, found: lab.settings.update(overrides=[found[1]]),
    ),
    case(
        "launch/resume_checks.py: this run has done step …, and train.steps … would cut it",
        at_folder(RUN, "model.vocab_size=300", "train.steps=3"),
        folder_check(lambda folder, loaded: refuse_unfit_state(folder, loaded.config)),
        r"use (train\.steps=\d+) or more",
        override,
    ),
    case(
        "launch/resume_checks.py: this run did all … steps, but its last checkpoint is damaged: …",
        lambda lab: (begin_run(lab), damage_newest(lab)),
        check_end,
        r".* again in a run of its own: (holdfast branch .*)",
        type_command,
    ),
    case(
        "launch/resume_checks.py: this run did all … steps, but its last checkpoint is damaged: …",
        lambda lab: (begin_run(lab), damage_newest(lab), damage_first(lab)),
        check_end,
        r"no older one is intact either: start over with --fresh",
        lambda lab, found: shutil.rmtree(lab.folder / RUN),
    ),
    case(
        F + "… is a file, not a folder",
        at_folder("run.yaml/new"),
        folder_check(describe),
        ANOTHER.replace(", or .*", ""),
        fixed(folder="new"),
    ),
    case(
        F + "this folder is not a run folder and has things in it (…)",
        at_folder("other", change=lambda lab: lab.write("other/a", "x")),
        folder_check(lambda folder, loaded: refuse_foreign(folder)),
        r"choose another with folder=\.\.\., or empty it",
        fixed(folder="new"),
    ),
    case(
        F + "this folder is not a run folder and has things in it (…)",
        at_folder("other", change=lambda lab: lab.write("other/a", "x")),
        folder_check(lambda folder, loaded: refuse_foreign(folder)),
        r"choose another with folder=\.\.\., or empty it",
        lambda lab, found: (lab.folder / "other/a").unlink(),
    ),
    case(
        F + "the run was trained on dataset …, and data.folder holds …",
        at_folder(RUN),
        folder_check(check_version),
        r"name the folder of that dataset, or start over with --fresh",
        start_over,
    ),
    case(
        "launch/runs.py: there is no run here",
        line("report {root}/none"),
        attempt,
        r"name a run folder, or a run file that was trained",
        lambda lab, found: lab.settings["line"].__setitem__(1, lab.path(RUN)),
    ),
    case(
        "launch/runs.py: this is not what 'holdfast train' wrote",
        line("checkpoint list {root}/run", change_file("resolved.json", lambda _: b"{")),
        attempt,
        r"restore it from a backup, or start over with --fresh",
        restore_backup,
    ),
    case(
        "cli/doctor_run.py: there is no run here",
        line("doctor {root}/none"),
        lambda lab: folder_of(Path(lab.settings["line"][1])),
        r"name a run folder, or a run file that was trained: holdfast train RUN.yaml",
        lambda lab, found: lab.settings["line"].__setitem__(1, lab.path(RUN)),
    ),
    case(
        "cli/init.py: there is something here already, and init never overwrites",
        line("init {root}/run.yaml"),
        attempt,
        r"choose another name: (holdfast init .*)",
        type_command,
    ),
    case(
        "cli/init.py: there is no such folder",
        line("init {root}/none/run.yaml"),
        attempt,
        r"make it first: (mkdir -p .*)",
        first,
    ),
    case(
        "report/page.py: the report cannot be written: this is a folder",
        line("report {root}/run --output {root}"),
        attempt,
        r"name a file in it with --output",
        lambda lab, found: lab.settings["line"].__setitem__(-1, lab.path("page.html")),
    ),
    case(
        "report/page.py: the report cannot be written (…)",
        line("report {root}/run --output {root}/none/page.html"),
        attempt,
        r"make the folder first: (mkdir -p .*)",
        first,
    ),
    case(
        "cli/report.py: … has no effect with …",
        line("report {root}/run --json --trace {root}/page.json"),
        attempt,
        r"leave one of the two out",
        lambda lab, found: lab.settings.update(line=["report", lab.path(RUN), "--json"]),
    ),
    case(
        "cli/track.py: the run has no trackers",
        line("track {root}/run"),
        attempt,
        r"name one, for example: (--to csv)",
        add(),
    ),
    case(
        "cli/track.py: an option is written NAME=VALUE",
        line("track {root}/run --to csv --option folder"),
        attempt,
        r"for example --option mode=online",
        lambda lab, found: lab.settings["line"].__setitem__(-1, f"folder={lab.folder}/csv"),
    ),
    case(
        "report/trackers/registry.py: there is no tracker …",
        line("track {root}/run --to cvs"),
        attempt,
        r"use (\w+)",
        replace("cvs"),
    ),
    case(
        "launch/process_limits.py: a process may have … open files, and a run with … workers on a "
        "node needs …",
        low(files=20),
        limits,
        r"raise the hard limit: ulimit -Hn (\d+), or --ulimit nofile=\d+ of a container",
        setting("files", int),
    ),
    case(
        "launch/process_limits.py: this machine or container has …, and its workers need …",
        low(memory=1 << 20),
        limits,
        r"raise the limit, or use fewer workers or a smaller model",
        enough_memory,
    ),
    case(
        "launch/process_limits.py: a process may have … of address space (…), and a worker needs …",
        begin_address_space,
        attempt_address_space,
        r"raise it: ulimit -v unlimited",
        lambda lab, found: lab.settings.pop("limit"),
    ),
]


def _set_to(lab: Lab, name: str) -> None:
    words = lab.settings["line"]
    words[words.index("--to") + 1] = lab.path(name)


def _give_bucket(lab: Lab) -> None:
    path = lab.folder / RUN / "resolved.json"
    resolved = json.loads(path.read_text())
    resolved["config"]["checkpoint"]["bucket"] = f"file://{lab.folder}/bucket"
    path.write_text(json.dumps(resolved))
    os.makedirs(lab.folder / "bucket")
