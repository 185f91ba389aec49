"""`holdfast score`: what it prints and the card that it writes."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from holdfast_lab.score.record import (
    Commit,
    ReferenceTable,
    RunRecord,
    format_record,
    format_reference,
)
from holdfast_lab.score.scenarios import scoring_seeds
from tests.support.commands import within


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
        "holdfast_lab.chaos.network.why_unavailable", lambda: "ip (iproute2) is missing"
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
