"""A campaign of `holdfast score` that is interrupted, and the same command once more."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from holdfast.cli.main import main
from holdfast_lab.score.record import ReferenceTable, format_reference
from tests.support.ranks import wait_until

ADAPTER = '''\
import json, sys
from holdfast_lab.score.harness.node_processes import LineReader, NodeProcesses

LOOP = """
import json, sys, time
for step in range(1, 10**9):
    time.sleep(0.05)
    row = {"t": time.time(), "step": step, "generation": 1, "rank": 0, "workers": 4,
           "samples": [[step - 1, step]], "loss": 1.0}
    with open(sys.argv[1], "a") as out:
        out.write(json.dumps(row) + "\\\\n")
"""

class Run:
    def __init__(self, at):
        self.at, self.processes = at, NodeProcesses(at.folder / "nodes", at.environment())
    def start(self, nodes):
        for node in nodes:
            lines = str(self.at.folder / ("lines" if node == "n1" else "others"))
            self.processes.start(node, [sys.executable, "-S", "-c", LOOP, lines])
    def kill(self, node): self.processes.kill(node)
    def warn(self, node, seconds): pass
    def worker_pids(self, node): return self.processes.tree(node)
    def commits(self): return LineReader(self.at.folder / "lines").commits()
    def corrupt_checkpoint(self): return False
    def stop(self): self.processes.stop()

class Own:
    name = "own"
    def why_unavailable(self, python): return ""
    def open(self, workplace): return Run(workplace)
'''


def test_runs_that_are_complete_are_kept_and_nothing_is_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(ADAPTER)
    Path("table.json").write_text(format_reference(ReferenceTable({4: 20.0})))
    given = ["score", "--k", "1200", "--trainer", "own.py:Own", "--reference", "table.json"]
    given += ["--scenario", "F8", "--seeds"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "holdfast.cli.main", *given, "3"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert re.match(r"own-\w{8}-k1200-F8-", process.stderr.readline())
    while len(nodes := psutil.Process(process.pid).children(recursive=True)) < 4:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130
    assert told == (
        "1 of 3 runs are complete, in score/runs; the same command keeps them\n"
        "holdfast score: interrupted\n"
    )
    # A node that was just being started ends a moment later.
    wait_until(lambda: all(_has_ended(node) for node in nodes), what=f"the end of {nodes}")
    assert not list(Path("score/work").glob("*"))
    assert main([*given, "2"]) == 0
    told = capsys.readouterr().err
    assert re.match(r"1 of 2 runs are kept from before, in score/runs\nown-\w{8}-k1200-F8-", told)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
