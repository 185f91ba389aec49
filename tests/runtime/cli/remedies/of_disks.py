"""Remedies of messages about disks: full, read-only, a mount point, or not the user's own.

Below the folder `disk`, one system call fails with the errno that such a disk answers.
"""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from re import Match
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.config.loading.load import load_config
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.read.vocabulary import load_tokenizer
from holdfast.launch.run.run_folder import run_id, set_aside
from holdfast.launch.run.runs import open_run
from holdfast.model.new_folder import new_folder
from holdfast.report.trackers.process import TrackerSpec, serve
from holdfast.training.memory.scratch_file import ScratchFile
from holdfast.wire.store import publish
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.cli.remedies.lab import Case, Lab, Mend, case, fixed
from tests.runtime.cli.remedies.of_checkpoints import branch
from tests.runtime.cli.remedies.of_runs import RUN, begin_run, describe, folder_check
from tests.runtime.cli.remedies.of_sources import TEXT, read
from tests.support.corpus import data_config, text_folder, text_source
from tests.support.models import train_tokenizer

DISK = "disk"


@contextmanager
def disk(lab: Lab) -> Iterator[None]:
    """Inside, the lab's `fault` is in force: the name of a call of `os`, and the errno."""
    fault = lab.settings.get("fault")
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            call, number = fault
            original = getattr(os, call)

            def failing(*given: Any, **more: Any) -> Any:
                paths = [str(one) for one in given if isinstance(one, str | os.PathLike)]
                if any(path.startswith(f"{lab.path(DISK)}/") for path in paths):
                    other = (None, paths[1]) if len(paths) > 1 else ()
                    raise OSError(number, os.strerror(number), paths[0], *other)
                return original(*given, **more)

            patch.setattr(os, call, failing)
        yield


def begin(call: str, number: int, **given: Any) -> Callable[[Lab], None]:
    def start(lab: Lab) -> None:
        begin_run(lab)
        shutil.copytree(lab.folder / RUN, lab.folder / DISK / RUN)
        lab.settings.update(fault=(call, number), **given)

    return start


def on_disk(attempt: Callable[[Lab], object]) -> Callable[[Lab], None]:
    def try_it(lab: Lab) -> None:
        with disk(lab):
            attempt(lab)

    return try_it


def make_room(lab: Lab, found: Match[str]) -> None:
    """What an operator does: there is room, or the disk may be written."""
    lab.settings["fault"] = None


def bad(site: str, call: str, number: int, attempt: Any, remedy: str, mend: Mend) -> Case:
    """A disk of this kind, at the path `disk/new`; `new` is on another disk."""
    given = {"to": f"{DISK}/new", "folder": f"{DISK}/new", "overrides": []}
    return case(site, begin(call, number, **given), on_disk(attempt), remedy, mend)


elsewhere = fixed(to="new", folder="new")


# --- attempts -------------------------------------------------------------------------------
def prepare(lab: Lab) -> None:
    source = text_folder(lab.folder / "in", files=6, words=60)
    config = data_config(lab.folder / lab.settings["folder"], text_source(source))
    prepare_dataset(config, say=lambda _: None)


def move_aside(lab: Lab) -> None:
    """What --fresh does before a run begins."""
    folder = Path(lab.settings.get("at", lab.path(f"{DISK}/{RUN}")))
    set_aside(folder, run_id(folder))


def export(lab: Lab) -> None:
    with new_folder(lab.folder / lab.settings["to"]) as folder:
        (folder / "config.json").write_text("{}")


def follow(lab: Lab) -> None:
    """What the process of a tracker does, with a run that is over."""
    over = threading.Event()
    over.set()
    call: Any = SimpleNamespace(call=lambda function, *arguments: function(*arguments))
    serve(TrackerSpec("csv", "tiny", lab.path(f"{DISK}/{RUN}")), over, call)


def create_object(lab: Lab) -> None:
    FolderStore(lab.folder / lab.settings["folder"]).create("terms/1.json", b"{}")


def create_without_links(lab: Lab) -> None:
    """On a file system, and with a C library, that cannot rename without replacing either."""
    with pytest.MonkeyPatch.context() as patch:
        if lab.settings["folder"] != "new":
            patch.setattr(publish.ctypes, "CDLL", lambda *_, **__: object())
        create_object(lab)


def place_state(lab: Lab) -> None:
    """Reserve a file for state; a disk that is full or broken answers `fails`."""
    folder, fails = lab.folder / lab.settings["folder"], lab.settings.get("fails", 0)
    if "fault" in lab.settings:
        folder.mkdir(exist_ok=True)

    def reserve(fd: int, start: int, length: int) -> None:
        if fails:
            raise OSError(fails, os.strerror(fails))

    with pytest.MonkeyPatch.context() as patch, disk(lab):
        patch.setattr(os, "posix_fallocate", reserve)
        patch.setattr(mmap, "mmap", lambda fd, length: b"")
        ScratchFile(str(folder), "tiny", 4096).close()


# --- files without rights -------------------------------------------------------------------
@contextmanager
def ordinary_user() -> Iterator[None]:
    """Inside, a file whose mode lets no user read it is refused, as for a user who is not root."""
    original = io.open

    def opened(file: Any, *given: Any, **more: Any) -> Any:
        is_path = isinstance(file, str | os.PathLike)
        if is_path and os.path.exists(file) and not os.stat(file).st_mode & 0o444:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return original(file, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        yield


def closed(name: str, content: str | bytes | None = None) -> Callable[[Lab], None]:
    """Begin with a file that no user may read."""

    def start(lab: Lab) -> None:
        path = lab.write(name, content) if content is not None else lab.folder / name
        path.chmod(0)
        lab.settings["closed"] = path

    return start


def permit(lab: Lab, found: Match[str]) -> None:
    lab.settings["closed"].chmod(0o644)


def as_user(attempt: Callable[[Lab], object]) -> Callable[[Lab], None]:
    def try_it(lab: Lab) -> None:
        with ordinary_user():
            attempt(lab)

    return try_it


def begin_closed_source(lab: Lab) -> None:
    lab.write("in/good.txt", TEXT)
    closed("in/a.txt", TEXT)(lab)


def read_source(lab: Lab) -> None:
    path = lab.settings["closed"].parent
    read(Lab(lab.folder, lab.trained, {"kind": "text", "path": str(path)}))


def begin_closed_tokenizer(lab: Lab) -> None:
    train_tokenizer(lab.folder / "tokenizer.json")
    closed("tokenizer.json")(lab)


def begin_looped(lab: Lab) -> None:
    """A link to itself, which root cannot read either."""
    begin_run(lab)
    path = lab.folder / RUN / "resolved.json"
    lab.settings["kept"] = path.read_bytes()
    path.unlink()
    path.symlink_to(path)


def restore_description(lab: Lab, found: Match[str]) -> None:
    path = lab.folder / RUN / "resolved.json"
    path.unlink()
    path.write_bytes(lab.settings["kept"])


SCRATCH = "training/memory/scratch_file.py: "
STORE, FOLDER, FILES = (
    "wire/store/run_store.py: ",
    "launch/run/run_folder.py: ",
    "data/read/files.py: ",
)
MOVED = r"move it yourself, or choose another folder"

CASES: list[Case] = [
    case(
        SCRATCH + "there is no folder … for the state of a rank",
        lambda lab: lab.settings.update(folder="not-mounted"),
        place_state,
        r"mount its disk or make it, or name another folder",
        lambda lab, found: (lab.folder / "not-mounted").mkdir(),
    ),
    bad(
        SCRATCH + "… cannot be written (…)",
        "open",
        errno.EACCES,
        place_state,
        r"change its permissions, or name another folder",
        elsewhere,
    ),
    case(
        SCRATCH + "the state of a rank needs … GB more in …, which has … GB free",
        lambda lab: lab.settings.update(folder=".", fails=errno.ENOSPC),
        place_state,
        r"make room and run the same command again, or name another folder",
        fixed(fails=0),
    ),
    case(
        SCRATCH + "the state of a rank in … cannot be used (…)",
        lambda lab: lab.settings.update(folder=".", fails=errno.EIO),
        place_state,
        r"check that disk and run the same command again, or name another folder",
        fixed(fails=0),
    ),
    bad(
        FILES + "the disk is full; what is finished stays and is not done again",
        "mkdir",
        errno.ENOSPC,
        prepare,
        r"make room and run the same command again",
        make_room,
    ),
    bad(
        FILES + "… cannot be opened: …",
        "mkdir",
        errno.EACCES,
        prepare,
        r"give yourself the permission, or name another data\.folder",
        elsewhere,
    ),
    bad(
        "launch/run/branch.py: the branch cannot be made here (…)",
        "rename",
        errno.EACCES,
        branch,
        r"name another folder with --to",
        elsewhere,
    ),
    bad(
        FOLDER + "the run folder is a mount point, which cannot be moved aside",
        "rename",
        errno.EBUSY,
        move_aside,
        r"start the new run in it with folder=(\S+), or empty it",
        lambda lab, found: lab.settings.update(at=found[1]),
    ),
    bad(
        FOLDER + "cannot be moved to … (…)",
        "rename",
        errno.EACCES,
        move_aside,
        MOVED,
        lambda lab, found: lab.settings.update(at=lab.path(f"{DISK}/other")),
    ),
    bad(
        FOLDER + "the disk is full",
        "mkdir",
        errno.ENOSPC,
        folder_check(describe),
        r"free some space and run the same command again",
        make_room,
    ),
    bad(
        FOLDER + "the run folder cannot be written (…)",
        "mkdir",
        errno.EACCES,
        folder_check(describe),
        r"choose another with folder=\.\.\., or change its permissions",
        elsewhere,
    ),
    bad(
        "model/new_folder.py: the disk is full",
        "mkdir",
        errno.ENOSPC,
        export,
        r"make room, or name another place",
        elsewhere,
    ),
    bad(
        "report/trackers/process.py: the tracker's folder cannot be written (…)",
        "mkdir",
        errno.EACCES,
        follow,
        r"correct its permissions",
        make_room,
    ),
    bad(
        STORE + "the disk is full",
        "mkdir",
        errno.ENOSPC,
        create_object,
        r"free some space, or use another folder",
        make_room,
    ),
    bad(
        STORE + "no permission to read or write the run folder",
        "mkdir",
        errno.EACCES,
        create_object,
        r"use a folder of your own, with folder=<path>",
        elsewhere,
    ),
    bad(
        STORE + "the run folder's file system is read-only",
        "mkdir",
        errno.EROFS,
        create_object,
        r"mount it for writing, or use another folder with folder=<path>",
        make_room,
    ),
    bad(
        STORE + "the file system can neither make hard links nor rename without replacing, and "
        "create-if-absent needs one of the two",
        "link",
        errno.EPERM,
        create_without_links,
        r"use a folder on a local disk or on NFS",
        elsewhere,
    ),
    case(
        "config/loading/load.py: the run file cannot be read (…)",
        closed("run.yaml", "seed: 1\n"),
        as_user(lambda lab: load_config(lab.folder / "run.yaml")),
        r"check its permissions",
        permit,
    ),
    case(
        "data/read/source_files.py: cannot be read (…)",
        begin_closed_source,
        as_user(read_source),
        r"give yourself the permission to read it, or leave it out of the source",
        permit,
    ),
    case(
        "data/read/vocabulary.py: … cannot be read (…)",
        begin_closed_tokenizer,
        as_user(lambda lab: load_tokenizer(lab.folder / "tokenizer.json")),
        r"give yourself the permission to read it, or name another",
        permit,
    ),
    case(
        "launch/run/runs.py: this cannot be read (…)",
        begin_looped,
        lambda lab: open_run(lab.folder / RUN),
        r"see what it is with: ls -l, then restore it from a backup",
        restore_description,
    ),
]
