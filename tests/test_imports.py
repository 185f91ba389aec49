"""Which modules load torch: those of its rooms, and nobody else's.

One process imports all modules of the other rooms, one after the other, and looks for torch.
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
    "holdfast.training",
    "holdfast.data.stream.loader",
    "holdfast.rollout.decode.attention",
    "holdfast.rollout.decode.policy",
    "holdfast.rollout.rewards.model",
    "holdfast.rollout.roles.host",
    "holdfast.rollout.roles.link",
    "holdfast.rollout.roles.policies",
    "holdfast.rollout.roles.teacher",
    "holdfast.rollout.roles.work",
    "holdfast.rollout.decode.threads",
    "holdfast.evaluation.model",
    "holdfast.evaluation.tasks",
    "holdfast.tasks",
    "holdfast.adapters",
    "holdfast.checkpoint.capture",
    "holdfast.elastic.worker",
    *(
        f"holdfast.options.{option}.apply"
        for option in (
            "async_tp",
            "asynchronous",
            "expert_copies",
            "keep_zeros",
            "qat",
            "quantized",
            "short_state",
            "tp_by",
        )
    ),
    "holdfast.options.asynchronous.weight_versions",
)

# Reads module names, imports each, prints the first that loads torch or cannot be imported:
# [module, what was wrong]. What one process loads, none of its modules loads alone.
IMPORTS = """
import importlib, json, sys, traceback
found = []
for module in json.load(sys.stdin):
    try:
        importlib.import_module(module)
        problem = "loads torch" if "torch" in sys.modules else ""
    except BaseException:
        problem = traceback.format_exc()[:30000]
    if problem:
        found = [module, problem]
        break
print(json.dumps(found))
"""


def modules() -> list[str]:
    return sorted(m.name for m in pkgutil.walk_packages(holdfast.__path__, "holdfast."))


def in_torch_room(module: str) -> bool:
    return any(module == room or module.startswith(room + ".") for room in TORCH_ROOMS)


def examine(names: list[str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        input=json.dumps(names),
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_modules_outside_of_torch_rooms_do_not_load_torch() -> None:
    names = [name for name in modules() if not in_torch_room(name)]
    assert len(names) > 40
    assert examine(names) == []


def test_the_examination_sees_torch() -> None:
    names = ["holdfast.errors", "holdfast.model.decoder"]
    assert examine(names) == ["holdfast.model.decoder", "loads torch"]


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
