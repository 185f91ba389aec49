"""An option lies in its folder, and few other files name it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import holdfast
from holdfast.options.registry import OPTIONS

SRC = Path(holdfast.__file__).parents[1]
FOLDERS = SRC / "holdfast" / "options"
MAX_FILES = 4  # outside of its folder
NAMES = {
    "async_tp": r"\basync_tp\b",
    "asynchronous": r"pipemare|pipedream|weight_versions|options\.asynchronous|\"asynchronous\"",
    "expert_copies": r"expert_copies|expert_replicas",
    "keep_zeros": r"\bkeep_zeros\b",
    "qat": r"\bqat\b",
    "quantized": r"\bquantized\b",
    "short_state": r"\bstate_dtype\b|short_state|eight_bit",
    "tp_by": r"\btp_by\b",
    "zero2_reduce": r"zero2",
}
"""Its keys and its modules, by the folder of an option."""


@pytest.mark.parametrize("option", NAMES)
def test_few_files_name_an_option(option: str) -> None:
    files = [
        str(path.relative_to(SRC))
        for path in sorted(SRC.rglob("*.py"))
        if FOLDERS / option not in path.parents and re.search(NAMES[option], path.read_text())
    ]
    assert len(files) <= MAX_FILES, files


def test_the_registry_has_all_folders() -> None:
    folders = {path.parent.name for path in FOLDERS.glob("*/__init__.py")}
    assert folders == set(OPTIONS) == set(NAMES)
    for option, files in OPTIONS.items():
        assert [
            f for f in ("keys", "cost", "apply") if (FOLDERS / option / f"{f}.py").exists()
        ] == [*files]
