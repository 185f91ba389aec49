"""What an orchestrator gets from `/healthz` and `/readyz`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.elastic.agent.health import HealthApplication, HealthStatus
from holdfast.wire.http.connection import RequestHead


class Node:
    """A node whose fields and clock the test sets."""

    def __init__(self) -> None:
        self.status = HealthStatus("training", 1, "leader", 1, 5, 0, 1)
        self.at = 0.0
        self.application = HealthApplication(
            lambda: self.status, lambda: b"", stalled_after_s=100.0, now=lambda: self.at
        )

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        answer = self.application.admit(RequestHead(b"GET", path.encode(), {}, frozenset()))
        return answer.status, json.loads(answer.body)


@pytest.mark.parametrize("state", ["opening", "recovering", "leaving", "over"])
def test_a_node_that_does_not_train_is_healthy_and_not_ready(state: str) -> None:
    node = Node()
    node.status = replace(node.status, state=state)
    node.get("/healthz")
    node.at = 1000.0
    assert node.get("/healthz")[0] == 200
    assert node.get("/readyz")[0] == 503


def test_a_node_that_trains_without_a_step_is_not_healthy() -> None:
    node = Node()
    assert (node.get("/healthz")[0], node.get("/readyz")[0]) == (200, 200)
    node.at = 101.0
    status, fields = node.get("/healthz")
    assert (status, fields["seconds_at_step"]) == (503, 101.0)
    node.status = replace(node.status, step=6)
    assert node.get("/healthz") == (200, node.status.to_json())


def test_the_answer_has_all_keys_that_it_had_in_older_versions() -> None:
    golden = Path(__file__).parents[3] / "golden" / "messages" / "healthz.json"
    for entry in json.loads(golden.read_text()):
        assert entry["json"].keys() <= Node().get("/healthz")[1].keys()
