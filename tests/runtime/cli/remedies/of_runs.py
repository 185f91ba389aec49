"""Remedies of messages about runs: their folders, checkpoints, branches, exports and reports.

An attempt is a command, called in this process so that its error can be caught.
"""

from __future__ import annotations

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
from holdfast.cli.table import all_commands
from holdfast.config.loading.load import load_config
from holdfast.launch.node.process_limits import memory_need, refuse_low_limits
from holdfast.launch.run.resume_checks import (
    ensure_end_is_intact,
    refuse_branch_without_state,
)
from holdfast.launch.run.run_folder import refuse_other, write_description
from holdfast.machine.hardware import detect_hardware
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.cli.remedies.lab import Lab

RUN = "run"


def run_command(line: list[str]) -> None:
    """Run a command; its UserError comes out."""
    command = typer.main.get_command(import_module(all_commands()[line[0]].module).app)
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
