"""`tools/flaky.py`: what failed runs once more, alone; a test that then passes is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.marks import in_campaign
from tests.support.ranks import ROOT

FLAKY = """
import os, pathlib
mark = pathlib.Path(__file__).with_name("mark")
def test_flaky():
    is_first = not mark.exists()
    mark.touch()
    assert not is_first
def test_good(): pass
"""
BROKEN = "def test_broken(): assert False\n"


def flaky(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, ROOT / "tools" / "flaky.py", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("jobs", ["0", in_campaign("2")])
def test_what_fails_once_is_named_last_and_what_fails_twice_is_red(
    tmp_path: Path, jobs: str
) -> None:
    (tmp_path / "test_once.py").write_text(FLAKY)
    done = flaky(tmp_path, "retry", "-n", jobs)
    assert done.returncode == 0, done.stdout
    title, *names = done.stdout.splitlines()[-2:]
    assert title.startswith("flaky")
    assert [name.strip() for name in names] == ["test_once.py::test_flaky"]

    (tmp_path / "mark").unlink()
    (tmp_path / "test_twice.py").write_text(BROKEN)
    done = flaky(tmp_path, "retry", "-n", jobs)
    assert done.returncode == 1
    assert "failed twice:\n  test_twice.py::test_broken" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("worker", "\ndef test_crash():\n    mark.touch(); os._exit(0)\n"),
        ("collection", None),
        ("interruption", "\ndef test_stop():\n    raise KeyboardInterrupt\n"),
        (
            "many",
            "\nimport pytest\n@pytest.mark.parametrize('i', range(30))\n"
            "def test_many(i): assert (mark.with_name(f'm{i}').exists(), mark.touch())[0]\n",
        ),
    ],
)
def test_a_run_that_is_not_complete_is_not_repeated(
    tmp_path: Path, name: str, text: str | None
) -> None:
    (tmp_path / "test_once.py").write_text(FLAKY + (text or ""))
    if text is None:
        (tmp_path / "test_none.py").write_text("import no_such_module\n")
    done = flaky(tmp_path, "retry", "-n", "1")
    assert done.returncode != 0, done.stdout
    assert "once more, alone" not in done.stdout


@pytest.mark.slow
def test_a_crash_when_a_test_runs_alone_is_red(tmp_path: Path) -> None:
    text = FLAKY.replace("assert not is_first", "assert not is_first; os._exit(0)")
    (tmp_path / "test_once.py").write_text(text)
    done = flaky(tmp_path, "retry", "-n", "1")
    assert done.returncode != 0
    assert "failed twice:\n  test_once.py::test_flaky" in done.stdout


@pytest.mark.slow
def test_repeats_count_the_failures(tmp_path: Path) -> None:
    (tmp_path / "test_once.py").write_text(FLAKY)
    done = flaky(tmp_path, "repeat", "3", "test_once.py")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].split() == ["1", "of", "3", "test_once.py::test_flaky"]
    assert flaky(tmp_path, "repeat", "2", "test_once.py").returncode == 0
