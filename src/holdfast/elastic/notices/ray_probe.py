"""A child of the agent that asks Ray's head for the draining nodes: see `elastic/notices/ray.py`.

    python -m holdfast.elastic.notices.ray_probe HOST:PORT NODE_ID EVERY

Prints {"deadline_ms": null or milliseconds since 1970} for this node, again and again, or {"error":
...} and exits. Exits when its standard input closes, that is with the agent.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

import psutil

from holdfast.wire import lifeline


def main(address: str, node_id: str, interval_s: float) -> None:
    threading.Thread(target=_end_with_agent, daemon=True).start()
    lifeline.ignore_agent_signals()
    try:
        # Connect to Ray's head; return Ray's own view of it. Private, as is every way
        # to the draining nodes.
        use_token()
        state = import_module("ray._private.state").GlobalState()
        options = import_module("ray._raylet").GcsClientOptions
        state._initialize_global_state(
            options.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
        )
        own = node_id or _find_own_node_id(state.node_table())
        while True:
            _print_message({"deadline_ms": state.get_draining_nodes().get(own)})
            time.sleep(interval_s)
    except Exception as error:  # whatever ray raises: the agent is told, and starts another child
        _print_message({"error": f"{type(error).__name__}: {error}"})


def use_token() -> None:
    """Authenticate by Ray's token if this machine has one, as `ray start` and `ray.init` do.

    Ray before 2.60 has no such default."""
    setup = "ray._private.authentication.authentication_token_setup"
    with suppress(ImportError, AttributeError):
        import_module(setup).maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _find_own_node_id(table: list[dict[str, Any]]) -> str:
    """Return the one node with an address of this machine."""
    here = {a.address for found in psutil.net_if_addrs().values() for a in found}
    own = [n["NodeID"] for n in table if n.get("Alive") and n.get("NodeManagerAddress") in here]
    if len(own) != 1:
        raise ValueError(
            f"{len(own)} nodes have an address of this machine; set HOLDFAST_RAY_NODE_ID"
        )
    return str(own[0])


def _end_with_agent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _print_message(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
