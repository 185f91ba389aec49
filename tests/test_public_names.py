"""The public package: few names, lazy, and typed alike in the stub and at run time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.public_names import HOMES

STUB = Path(holdfast.__path__[0]) / "__init__.pyi"


def test_there_are_at_most_twenty_and_the_stub_has_the_same() -> None:
    assert len(HOMES) <= 20
    imports = re.findall(r"^from (\S+) import (\w+) as \2$", STUB.read_text(), re.MULTILINE)
    assert {name: home for home, name in imports} == HOMES


def test_every_name_is_documented() -> None:
    page = (Path(holdfast.__path__[0]).parents[1] / "docs" / "guide" / "python.md").read_text()
    assert [name for name in HOMES if f"`{name}" not in page] == []


def test_every_name_and_method_is_in_the_file_that_the_type_checker_reads() -> None:
    text = (Path(__file__).parent / "support" / "user_file.py").read_text()
    assert [name for name in HOMES if f"holdfast.{name}" not in text] == []
    methods = [name for name in vars(holdfast.Task) if not name.startswith("_")]
    assert [name for name in methods if f"def {name}(" not in text] == []


@pytest.mark.parametrize("name", HOMES)
def test_every_name_can_be_had(name: str) -> None:
    assert getattr(holdfast, name) is not None
    assert name in dir(holdfast)


def test_the_package_imports_nothing_heavy_and_train_can_be_called_after_its_room_came() -> None:
    program = """
import sys, holdfast
assert not {"torch", "pydantic", "numpy"} & set(sys.modules)
import holdfast.training.engine.step_status
try:
    holdfast.train(None, "no-such-run.yaml")
except holdfast.UserError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert "there is no such run file" in done.stdout, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        holdfast.trian  # type: ignore[attr-defined]  # noqa: B018
