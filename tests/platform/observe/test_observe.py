"""`holdfast observe`: what it writes is what Prometheus, Alertmanager and Grafana take."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

from holdfast.report.alerts.catalogue import ALERTS
from holdfast.report.alerts.expression import Increase, Latest
from holdfast.report.live.catalogue import CATALOGUE, INDICATORS
from holdfast_platform.observe.boards import queries_of
from holdfast_platform.observe.page import page
from tests.support.commands import within
from tests.support.ranks import ROOT

RUN_FILE = """\
name: observed
observe:
  objectives:
    - {indicator: goodput, target: 0.5, period: 6h}
    - {indicator: progress, target: 0.95, period: 7d}
"""
NAMES = {name for spec in CATALOGUE.values() for name in spec.sample_names}
OF_PROMETHEUS = {"up", "ALERTS"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files for a run that has not begun."""
    place = tmp_path_factory.mktemp("observe")
    (place / "run.yaml").write_text(RUN_FILE)
    done = within(
        "observe", place / "run.yaml", "--to", place / "files", "--page", "http://127.0.0.1:1/x"
    ).succeeds()
    assert "no page at 14.4 times the budget" in done.err
    assert "severity ticket go nowhere" in done.err
    return place / "files"


def expressions(folder: Path) -> dict[str, str]:
    """Every expression of rules and boards, by its place."""
    found = {}
    for group in yaml.safe_load((folder / "rules.yml").read_text())["groups"]:
        for number, rule in enumerate(group["rules"]):
            found[f"{group['name']} {number}"] = rule["expr"]
    for path in (folder / "grafana/boards").iterdir():
        for number, query in enumerate(queries_of(json.loads(path.read_text()))):
            found[f"{path.name} {number}"] = query
    return found | {one.name: one.query for one in INDICATORS}


def test_every_expression_is_promql_over_names_of_the_catalogue(folder: Path) -> None:
    records = {
        rule["record"]
        for group in yaml.safe_load((folder / "rules.yml").read_text())["groups"]
        for rule in group["rules"]
        if "record" in rule
    }
    for place, text in expressions(folder).items():
        promql_parser.parse(text)
        words = set(re.findall(r"\b(?:run:)?holdfast_\w+(?::max)?|\bup\b|\bALERTS\b", text))
        assert words, place
        assert words <= NAMES | records | OF_PROMETHEUS, place


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("promtool", ("check", "rules", "rules.yml")),
        ("promtool", ("check", "config", "prometheus.yml")),
        ("amtool", ("check-config", "alertmanager.yml")),
    ],
)
def test_the_real_tools_take_the_files(folder: Path, tool: str, arguments: tuple[str, ...]) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} in PATH: apt install prometheus prometheus-alertmanager")
    done = subprocess.run([tool, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rule_that_cannot_fire_is_not_written(folder: Path) -> None:
    (rules,) = (
        group["rules"]
        for group in yaml.safe_load((folder / "rules.yml").read_text())["groups"]
        if group["name"] == "holdfast-alerts"
    )
    burns = [rule["expr"] for rule in rules if rule["alert"] == "ObjectiveBurn"]
    assert burns
    for expression in burns:
        assert all(0 < float(number) < 1 for number in re.findall(r"> ([0-9.]+)\)", expression))
    pages = [rule for rule in rules if rule["labels"]["severity"] == "page"]
    assert {"goodput 50 % over 6h", "progress 95 % over 7d"} <= {
        rule["labels"].get("objective") for rule in pages
    }


def test_the_page_of_metrics_is_current() -> None:
    assert (ROOT / "docs/reference/metrics.md").read_text() == page(), "run: make docs"


def test_every_alert_has_a_runbook_whose_commands_exist() -> None:
    """`test_named_commands.py` looks up the commands of all pages."""
    named = {ROOT / "docs" / alert.runbook for alert in ALERTS.values()}
    burn = ROOT / "docs/runbooks/objective-burn.md"
    assert named | {burn} == set((ROOT / "docs/runbooks").glob("*.md"))
    for path in named | {burn}:
        text = path.read_text()
        assert "## Look" in text, path.name
        assert "## Do" in text, path.name
        assert re.search(r"^    holdfast .*RUN", text, re.MULTILINE), path.name
        assert "The alert clears when" in text, path.name


def test_a_name_that_the_catalogue_lacks_is_refused() -> None:
    with pytest.raises(KeyError):
        Latest("no_such_metric")
    with pytest.raises(KeyError):
        Increase("checkpoints", {"result": "splendid"})
    with pytest.raises(KeyError):
        Increase("checkpoints", {"colour": "red"})


def test_serve_and_to_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: observed\n")
    within("observe", tmp_path / "run.yaml").refuses("--to")
    within("observe", tmp_path, "--serve", "127.0.0.1:0").refuses("there is no run")
