"""The example of a model of one's own: a script that calls `holdfast.train`, and the lines of
docs/guide/python.md in its folder."""

from __future__ import annotations

import doctest
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.public_names import HOMES

ROOT = Path(__file__).parents[2]
FOLDER, PAGE = ROOT / "examples" / "own_model", ROOT / "docs" / "guide" / "python.md"


@pytest.mark.slow
def test_the_script_trains_and_every_line_of_the_page_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("spirals.py", "run.yaml"):
        shutil.copy(FOLDER / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        [sys.executable, "spirals.py"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("step 300: "), done.stdout
    assert int(last.split()[2].rstrip("%")) > 90

    lines = PAGE.read_text().split("```pycon\n")[1].split("```")[0]
    assert [name for name in HOMES if f"holdfast.{name}" not in lines] == []
    parsed = doctest.DocTestParser().get_doctest(lines, {}, PAGE.name, str(PAGE), 0)
    told: list[str] = []
    result = doctest.DocTestRunner().run(parsed, out=told.append)
    assert result.attempted > 15
    assert not result.failed, "".join(told)

    # a script that lies in the task's folder, and has imported more of it than the task does
    (tmp_path / "reading.py").write_text(
        f"import holdfast, spirals\nprint(len(holdfast.batches({str(tmp_path / 'run')!r}, 1)))\n"
    )
    read = subprocess.run(
        [sys.executable, "reading.py"], capture_output=True, text=True, timeout=240, check=False
    )
    assert (read.returncode, read.stdout.strip()) == (0, "4"), read.stderr
