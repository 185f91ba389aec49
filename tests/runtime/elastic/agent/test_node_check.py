"""An agent's answer to `holdfast doctor`: which agents it reaches, and how much memory it has."""

from __future__ import annotations

import asyncio
import json
import socket

from holdfast.elastic.agent.health import HealthStatus
from holdfast.elastic.agent.requests import check_node
from holdfast.elastic.protocol.node_check import LISTENS, NodeCheck, NodeCheckReply

HEALTH = HealthStatus("training", 2, "leading", 3, 120, 100, 1)


def test_each_link_has_an_outcome_and_a_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nothing listens at its port
        asked = NodeCheck(
            {
                "there": f"127.0.0.1:{there.getsockname()[1]}",
                "ended": f"127.0.0.1:{bound.getsockname()[1]}",
                "strange": "no address",
            }
        )
        found = asyncio.run(check_node(HEALTH, NodeCheck.from_json(asked.to_json())))
    assert found.links["there"].outcome == LISTENS
    assert 0 < (found.links["there"].seconds or 0) < 10
    assert (found.links["ended"].outcome, found.links["ended"].seconds) == ("refused", None)
    assert found.links["strange"].outcome == "unknown"
    assert (found.state, found.step, found.committed_step) == ("training", 120, 100)
    assert 0 < found.memory.available <= found.memory.total
    assert NodeCheckReply.from_json(json.loads(json.dumps(found.to_json()))) == found
