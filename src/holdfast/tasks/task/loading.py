"""Finds a user's task by its name, makes it, and names the source that it came from.

The module lies in the task's folder or in an installed package. The folder comes last in the path,
so that nothing in it takes the place of an installed module.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.config.sections.task import TaskConfig
from holdfast.errors import PeerLostError, TaskError, nearest_of
from holdfast.tasks.task.importing import importing
from holdfast.tasks.task.task import Task

DIGEST_BYTES = 16
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_INSTALLED = ("site-packages", "dist-packages")
_HOLDFAST, _PYTHON = Path(__file__).parents[2], Path(os.__file__).parent


def load_task(config: TaskConfig) -> Task:
    """Import and make the task. Raises TaskError."""
    module_name, _, class_name = config.name.partition(":")
    module = import_module(module_name, config.folder)
    kind = getattr(module, class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise TaskError(
            f"{class_name} in {module.__file__} is no subclass of holdfast.Task"
            if kind is not None
            else f"{module.__file__} has no class {class_name}",
            remedy="name a class that derives from holdfast.Task",
        )
    _check_arguments(kind, config.args)
    with user_code(f"task {config.name} cannot be made"):
        return kind(**config.args)


def _check_arguments(kind: type[Task], given: Mapping[str, Any]) -> None:
    """Raises TaskError, with the key, for an argument that the class does not take or lacks."""
    try:
        taken = signature(kind).parameters.values()
    except (ValueError, TypeError):
        return  # a class that hides its signature
    named = [p for p in taken if p.kind in _NAMED]
    names = [p.name for p in named]
    listed = f"its arguments: {', '.join(names) or 'none'}"
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in taken)
    if unknown := [] if takes_any else [name for name in given if name not in names]:
        close = nearest_of(unknown[0], set(names) - set(given))
        raise TaskError(
            f"class {kind.__name__} takes no argument {unknown[0]}",
            where=f"task.args.{unknown[0]}",
            remedy=f"write task.args.{close} ({listed})" if close else f"remove it ({listed})",
        )
    if lacking := [p.name for p in named if p.default is Parameter.empty and p.name not in given]:
        raise TaskError(
            f"class {kind.__name__} needs the argument {lacking[0]}",
            where="task.args",
            remedy=f"give task.args.{lacking[0]} a value ({listed})",
        )


def source_digest(config: TaskConfig, task: Task | None = None) -> str:
    """Digest of the task's module, of what else lies in its folder or package and came with it, and
    of the files that `task` names. Raises TaskError."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with user_code("files() failed"):
        for number, path in enumerate(() if task is None else task.files()):
            digest.update(f"file {number}\0".encode())
            digest.update(hashlib.blake2b(Path(path).read_bytes()).digest())
    for name, path in sorted(_own_sources(config)):
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Make one sentence of an exception in a user's code. An OSError stays: it may pass. A lost
    peer stays: it is no mistake in that code, and the peer may say what is."""
    try:
        yield
    except (TaskError, OSError, PeerLostError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise TaskError(
            f"{what}: {type(error).__name__}: {text}{place_in_user_code(error)}"
        ) from error


def place_in_user_code(error: Exception) -> str:
    """The last line of the user's own files that was running, in brackets; without one that of a
    library; "" if Holdfast alone was running."""
    frames = [(f, Path(f.filename)) for f in traceback.extract_tb(error.__traceback__)]
    others = [(f, path) for f, path in frames if not path.is_relative_to(_HOLDFAST)]
    own = [f for f, path in others if not _is_library(path)]
    last = (own or [f for f, _ in others])[-1:]
    return "".join(f" ({os.path.basename(f.filename)}:{f.lineno})" for f in last)


def _is_library(path: Path) -> bool:
    is_installed = path.is_relative_to(_PYTHON) or bool(set(_INSTALLED) & set(path.parts))
    return is_installed or str(path).startswith("<")  # code without a file


def import_module(name: str, folder: str) -> ModuleType:
    """Import a module of a user's folder, or an installed one. Raises TaskError."""
    if folder and folder not in sys.path:
        sys.path.append(folder)
    try:
        with user_code(f"module {name} cannot be imported"), importing():
            module = importlib.import_module(name)
    except TaskError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and name.startswith(str(cause.name)):
            raise TaskError(
                f"there is no module {name} in {folder or '.'}, nor among the installed packages",
                remedy="name its folder in task.folder",
            ) from None
        raise
    beside = Path(folder, *name.split(".")).with_suffix(".py")
    found = Path(str(module.__file__)).resolve()
    if folder and beside.exists() and found != beside.resolve():
        raise TaskError(
            f"module {name} is {found}, which hides {beside}",
            remedy="give your module another name",
        )
    return module


def _own_sources(config: TaskConfig) -> Iterator[tuple[str, Path]]:
    top = config.name.partition(":")[0].partition(".")[0]
    folder = os.path.join(os.path.realpath(config.folder), "") if config.folder else None
    real_folder = cache(os.path.realpath)  # torch brings a thousand modules of a few folders
    for name, module in list(sys.modules.items()):
        file: Any = getattr(module, "__file__", None)
        if not file or name.partition(".")[0] == "holdfast":
            continue
        real = os.path.join(real_folder(os.path.dirname(file)), os.path.basename(file))
        real = os.path.realpath(real) if os.path.islink(real) else real
        is_beside = (
            folder is not None
            and real.startswith(folder)
            and not any(part in _INSTALLED for part in real.split(os.sep))
        )
        if (is_beside or name.partition(".")[0] == top) and os.path.isfile(real):
            yield name, Path(real)
