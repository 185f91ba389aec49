"""Each alert has a case in which promtool sees it fire, one that is silent, one that clears."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from holdfast.report.alerts.catalogue import ALERTS
from holdfast_platform.observe.rules import rule_groups
from tests.support.alert_cases import CASES, RUN_LABEL, promtool_test


def test_every_alert_has_a_case() -> None:
    assert CASES.keys() == ALERTS.keys()
    for name, case in CASES.items():
        assert 0 < case.silent < case.fires < case.clears, name


def test_promtool_sees_each_alert_silent_firing_and_cleared(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool in PATH: apt install prometheus")
    groups = rule_groups([*ALERTS.values()])
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(groups))
    written = {rule["alert"]: rule for rule in groups["groups"][1]["rules"]}
    for name, case in CASES.items():
        test = promtool_test(name, case, "rules.yml")
        for at in test["tests"][0]["alert_rule_test"]:
            for alert in at["exp_alerts"]:
                alert["exp_labels"] = {RUN_LABEL: "demo"} | written[name]["labels"]
                alert["exp_annotations"] = {
                    key: text.replace("{{ $labels.run_id }}", "demo")
                    for key, text in written[name]["annotations"].items()
                }
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        ["promtool", "test", "rules", *(f"{name}.yml" for name in CASES)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == len(CASES)
