"""`observe.webhook` with real processes: a run posts its alert, once, with the token."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.elastic.protocol.fault_orders import FaultOrder, FaultOrders
from tests.support.commands import apart
from tests.support.monitoring import receiver
from tests.support.nodes import prepared
from tests.support.ranks import DEADLINE_S


@pytest.mark.slow
def test_a_run_posts_its_alert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_WEBHOOK_TOKEN", "a-token")
    faults = FaultOrders(tmp_path / "faults")
    faults.prepare()
    faults.arm(FaultOrder(1, "gradient", "not finite", "backward", step=1, rank=0))
    settings = ("train.steps=2", "layout.workers=1", f"cluster.faults={faults.folder}")
    with receiver() as hook:
        more = (f"observe.webhook={hook.address}", "observe.every_seconds=0.5")
        apart("train", prepared(tmp_path), *settings, *more, deadline=DEADLINE_S).succeeds()
    assert hook.statuses("StepNotFinite") == ["firing"]
    assert len(hook.bodies) == 1, "and of nothing else"
    assert hook.headers[0]["authorization"] == "Bearer a-token"
    assert hook.bodies[0]["groupLabels"] == {"run_id": "tiny", "cause": "loss"}
    assert [path.name for path in (tmp_path / "run/alerts").iterdir()] == ["StepNotFinite"]
