"""`holdfast score`: what it prints and the card that it writes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from holdfast.cli.main import main
from holdfast_lab.score.record import (
    Commit,
    ReferenceTable,
    RunRecord,
    format_record,
    format_reference,
)
from holdfast_lab.score.scenarios import scoring_seeds
from tests.support.commands import within
from tests.support.ranks import wait_until


def test_a_policy_gets_a_vector_a_score_and_a_card(tmp_path: Path) -> None:
    out = tmp_path / "new" / "score"
    given = ["score", "--level", "0", "--scenario", "F0,F1,F6,F8,F11,F12", "--out", str(out)]
    told = within(*given).succeeds().out
    assert "Resilience Score " in told
    for name in ("S_RPO", "S_RTO", "S_EO", "S_J", "S_P", "w1/RPO", "50 % lower or higher"):
        assert name in told
    root = ElementTree.fromstring((out / "card-0-holdfast.svg").read_text())
    assert root.tag.endswith("svg")
    page = (out / "card-0-holdfast.html").read_text()
    assert "F12" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", ""), "it loads nothing"


def test_weights_of_a_file_change_the_score(tmp_path: Path) -> None:
    weights = tmp_path / "w.json"
    weights.write_text('{"version": "own", "weights": {"RPO":1,"RTO":0,"EO":0,"J":0,"P":0}}')
    given = ["score", "--level", "0", "--scenario", "F1", "--out", str(tmp_path / "s")]
    plain = within(*given).succeeds()
    assert "no score: this set of scenarios does not measure S_EO" in plain.out
    assert "weights own: RPO 1.00" in within(*given, "--weights", weights).succeeds().out


def test_the_scenarios_that_are_named_give_a_score(tmp_path: Path) -> None:
    given = ["score", "--level", "0", "--out", str(tmp_path / "s"), "--scenario"]
    named = re.search(r"no score: .*; (\S+) would", within(*given, "F1").succeeds().out)
    assert named is not None
    assert "Resilience Score " in within(*given, f"F1,{named[1]}").succeeds().out


def test_a_scenario_of_another_level_is_refused() -> None:
    within("score", "--level", "1", "--scenario", "F13").refuses("level 1 has no scenario 'F13'")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--level", "0", "--trainer", "torchft"], "--trainer has no effect at level 0"),
        (["--level", "0", "--python", "python3"], "--python has no effect at level 0"),
        (["--policy", "parcae"], "--policy has no effect at level 1"),
        (["--scenario", ","], "this names no scenario"),
    ],
)
def test_an_option_of_the_other_level_is_refused(
    given: list[str], told: str, tmp_path: Path
) -> None:
    within("score", *given, "--out", tmp_path / "s").refuses(told)
    assert not (tmp_path / "s").exists()


def test_a_degraded_network_is_refused_if_the_nodes_can_have_none_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "holdfast_lab.commands.score.why_unavailable", lambda: "ip (iproute2) is missing"
    )
    within("score", "--scenario", "F1,F9", "--out", tmp_path).refuses(
        "there is no network of nodes for F9: ip (iproute2) is missing", "leave F9 out"
    )
    assert not (tmp_path / "runs").exists()


def test_a_trainer_whose_nodes_share_a_network_is_refused_for_a_degraded_one(
    tmp_path: Path,
) -> None:
    adapter = tmp_path / "own.py"
    adapter.write_text(
        "class Own:\n    name = 'own'\n    def why_unavailable(self, python): return ''\n"
        "    def open(self, workplace): raise AssertionError\n"
    )
    given = ["score", "--trainer", f"{adapter}:Own", "--scenario", "F9", "--out", tmp_path]
    within(*given).refuses("own.py:Own share one network")


def test_runs_at_k_and_at_twice_k_say_on_the_card_whether_k_is_valid(tmp_path: Path) -> None:
    (seed,) = scoring_seeds(1)
    (tmp_path / "runs").mkdir()
    for k, missing in ((10.0, 0), (20.0, 1)):
        steps = tuple(Commit(n * 10 / k, n, 24.0, 4) for n in range(1, 21 - missing))
        made = RunRecord("F1", seed, 200 / k, ((0.0, 4),), (), steps, 10 / k, 200 / k)
        (tmp_path / "runs" / f"holdfast-k{k:g}-F1-{seed}.json").write_text(format_record(made))
        table = format_reference(ReferenceTable({4: 2.4 * k}))
        (tmp_path / f"reference-k{k:g}.json").write_text(table)
    given = ["score", "--scenario", "F1", "--k", "10", "--out", str(tmp_path)]
    assert "valid" not in within(*given).succeeds().out
    told = within(*given, "--validate-k").succeeds().out
    assert "k = 10 is valid: G at k = 20 differs by +0.0 % at most" in told
    assert "valid" in (tmp_path / "card-1-holdfast.html").read_text()
    assert "the start of processes counts" in told, "these runs do not say that they parked nodes"


# --- an interrupted campaign, and the same command once more --------------------------------------
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
        [sys.executable, "-P", "-m", "holdfast.cli.main", *given, "12"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("12 runs of real processes: 12 s")
    assert re.match(r"own-\w{8}-k1200-F8-", process.stderr.readline())
    while len(nodes := psutil.Process(process.pid).children(recursive=True)) < 4:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130, told
    ended = re.search(
        r"(\d+) of 12 runs are complete, in score/runs; the same command keeps them\n"
        r"holdfast score: interrupted\n$",
        told,
    )
    assert ended
    kept = int(ended[1])  # more than 1 where this process waited for a core
    assert 1 <= kept < 12
    # A node that was just being started ends a moment later.
    wait_until(lambda: all(_has_ended(node) for node in nodes), what=f"the end of {nodes}")
    assert not list(Path("score/work").glob("*"))
    assert main([*given, str(kept + 1)]) == 0
    told = capsys.readouterr().err
    assert re.match(
        rf"{kept} of {kept + 1} runs are kept from before, in score/runs\n1 run of .*\n"
        r"own-\w{8}-k1200-F8-",
        told,
    )


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
