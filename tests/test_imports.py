"""Which modules load torch: those of its rooms, and nobody else's.

Processes are forked from one interpreter that has loaded third-party packages (none of which may
load torch) and nothing of ours; each imports one module. What came along with a module and left
torch unloaded has shown the same of itself, and gets no process of its own: those that import the
most go first, which makes the whole take seconds.
"""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

TORCH_ROOMS = (
    "holdfast.model",
    "holdfast.parallel",
    "holdfast.train",
    "holdfast.data.loader",
    "holdfast.tasks",
    "holdfast.adapters",
    "holdfast.checkpoint.capture",
    "holdfast.elastic.worker",
)

HIGHEST = ("cli", "export", "launch", "chaos", "simulate", "report", "elastic")

# Reads module names, forks once for each that no other one brought along, prints
# {module: what was wrong}.
SERVER = """
import importlib, json, os, sys, traceback
for name in ("numpy", "pydantic", "yaml", "xxhash", "typer", "rich.console",
             "httptools", "psutil"):
    importlib.import_module(name)
assert "torch" not in sys.modules and "holdfast" not in sys.modules
found, proven = {}, set()
for module in json.load(sys.stdin):
    if module in proven:
        continue
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            importlib.import_module(module)
            problem = "loads torch" if "torch" in sys.modules else ""
        except BaseException:
            problem = traceback.format_exc()[:30000]
        ours = [] if problem else [name for name in sys.modules if name.startswith("holdfast")]
        os.write(writer, json.dumps([problem, ours]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = file.read().decode()
    _, status = os.waitpid(child, 0)
    problem, ours = json.loads(answer or '["", []]')
    proven.update(ours)
    if problem or status or module not in proven:
        found[module] = problem or f"ended with status {status}"
print(json.dumps(found))
"""


def modules() -> list[str]:
    return sorted(m.name for m in pkgutil.walk_packages(holdfast.__path__, "holdfast."))


def in_torch_room(module: str) -> bool:
    return any(module == room or module.startswith(room + ".") for room in TORCH_ROOMS)


def examine(names: list[str]) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", SERVER],
        input=json.dumps(names),
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_modules_outside_of_torch_rooms_do_not_load_torch() -> None:
    names = [name for name in modules() if not in_torch_room(name)]
    assert len(names) > 40
    names.sort(key=lambda name: name.split(".")[1] not in HIGHEST)
    assert examine(names) == {}


def test_the_examination_sees_torch() -> None:
    assert examine(["holdfast.model.decoder"]) == {"holdfast.model.decoder": "loads torch"}


@pytest.mark.parametrize("room", TORCH_ROOMS)
def test_rooms_named_here_exist(room: str) -> None:
    assert room in modules()


def test_init_files_are_empty_but_for_the_version() -> None:
    root = Path(holdfast.__path__[0])
    own = root / "__init__.py"
    filled = [p for p in root.rglob("__init__.py") if p != own and p.read_text().strip()]
    assert filled == []
    assert holdfast.__version__
    assert {name for name in vars(holdfast) if not name.startswith("__")} <= {"version"} | {
        path.stem for path in root.iterdir()
    }


def test_every_module_can_be_found_by_its_folder() -> None:
    """A folder without __init__.py would be missed by the walk above."""
    root = Path(holdfast.__path__[0])
    folders = {p.parent for p in root.rglob("*.py")}
    assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []
