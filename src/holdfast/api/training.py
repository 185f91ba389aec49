"""`holdfast.train`: a run from a script or a notebook."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from holdfast.config.loading.load import LoadedConfig
    from holdfast.tasks.task.task import Task


@dataclass(frozen=True)
class TrainingResult:
    """How `train` ended. exit_code: as of the command `holdfast train`; 0 also for a run that was
    asked to stop. step: the last step of the newest checkpoint, 0 if there is none."""

    folder: Path
    exit_code: int
    step: int


def train(
    task: type[Task] | None,
    run_file: str | Path | RunFile,
    overrides: Sequence[str] = (),
    *,
    args: Mapping[str, Any] | None = None,
    fresh: bool = False,
) -> TrainingResult:
    """Start or resume the run of a run file, and return when it ends.

    Args:
        task: the class to train, in a file of its own or in the script that is run. None: what the
            run file names.
        overrides: `key=value`, as on the command line.
        args: keyword arguments of the class, in place of the run file's `task.args`.
        fresh: begin again; the old run folder is moved aside.

    Raises UserError, with one sentence, for what has to be corrected.
    """
    from holdfast.api.start import start
    from holdfast.checkpoint.restore.catalog import list_commits, step_of
    from holdfast.config.loading.load import load_config
    from holdfast.launch.run.runs import run_folder_of
    from holdfast.tasks.task.importing import is_importing
    from holdfast.wire.store.run_location import store_of_run

    if is_importing():
        raise TaskError(
            "holdfast.train is called while a worker imports this file",
            where="task",
            remedy="put the call below: if __name__ == '__main__':",
        )
    of_file = run_file.overrides if isinstance(run_file, RunFile) else ()
    path = run_file.path if isinstance(run_file, RunFile) else Path(run_file)
    given = [*_task_overrides(task), *of_file, *_as_list(overrides)]
    if args is not None:
        given.append(f"task.args={_as_json(args)}")
    code = start(path, given, fresh=fresh).exit_code
    folder = run_folder_of(load_config(path, given).config)
    commits = list_commits(store_of_run(folder))
    return TrainingResult(folder, code, step_of(commits[0]) if commits else 0)


def _task_overrides(task: type[Task] | None) -> list[str]:
    """The keys that name a class. Raises TaskError for one that another process cannot import."""
    if task is None:
        return []
    if not isinstance(task, type):
        raise TaskError(
            f"holdfast.train takes a class, not {type(task).__name__} {str(task)[:80]!r}",
            where="task",
            remedy="give the class itself, such as Net, and its arguments as args={...}",
        )
    module, file = task.__module__, _file_of(task)
    if file is None or "." in task.__qualname__:
        raise TaskError(
            f"class {task.__qualname__} cannot be imported by a worker",
            where="task",
            remedy="write it at the top level of a file (in a notebook: %%writefile my_task.py)",
        )
    if module == "__main__":
        module, folder = file.stem, file.parent
    else:
        parts = module.split(".")
        depth = len(parts) if file.name == "__init__.py" else len(parts) - 1
        folder = file.parents[depth]
    return [f"task.name={module}:{task.__qualname__}", f"task.folder={folder}"]


def _as_list(overrides: Sequence[str]) -> list[str]:
    """Raises ConfigError for a text or a dict, which would be read letter by letter or without its
    values."""
    if isinstance(overrides, str | Mapping):
        raise ConfigError(
            f"overrides are a list of texts, not {type(overrides).__name__}",
            where="holdfast.train",
            remedy='write ["train.steps=20"]',
        )
    return list(overrides)


def _as_json(args: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(args))
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"args cannot be written into the run file: {error}",
            where="task.args",
            remedy="give numbers, texts and lists, and make other objects in __init__",
        ) from None


def _file_of(task: type[Task]) -> Path | None:
    file = getattr(sys.modules.get(task.__module__), "__file__", None)
    return None if file is None else Path(file).resolve()


class RunFile:
    """A run file with overrides. It does not change; `changed` makes another."""

    def __init__(self, path: Path, overrides: tuple[str, ...], loaded: LoadedConfig) -> None:
        self.path, self.overrides, self._loaded = path, overrides, loaded

    @property
    def values(self) -> dict[str, Any]:
        """All values, defaults too, as nested dicts."""
        return self._loaded.config.model_dump(mode="json")

    def __getitem__(self, key: str) -> Any:
        """Return the value of a dotted key or a section. Raises KeyError."""
        found: Any = self.values
        for part in key.split("."):
            try:
                found = found[int(part)] if isinstance(found, list) else found[part]
            except (ValueError, IndexError, TypeError, KeyError):
                raise KeyError(key) from None
        return found

    def origin(self, key: str) -> str:
        """Return where the value of a key comes from. Raises KeyError."""
        return str(self._loaded.origins[key])

    def changed(self, values: Mapping[str, Any]) -> RunFile:
        """Return the same file with other values by dotted key. Raises ConfigError."""
        given = tuple(f"{key}={json.dumps(value)}" for key, value in values.items())
        return load_run_file(self.path, (*self.overrides, *given))


def load_run_file(path: str | Path, overrides: tuple[str, ...] = ()) -> RunFile:
    """Read and check a run file. overrides: `key=value`, as on the command line. Raises
    ConfigError."""
    from holdfast.config.loading.load import load_config

    return RunFile(Path(path), tuple(overrides), load_config(Path(path), overrides))
