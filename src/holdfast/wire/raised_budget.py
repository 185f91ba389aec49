"""Raises of a run's budget, as objects of its run store: the largest one of each limit counts.

budget/<n>.json    {"max_cost": 12.5, "max_node_hours": null, "time": 1764403200.0}
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress

from holdfast.core.json_parsing import parse_json
from holdfast.wire.store.run_store import AlreadyExistsError, RunStore

PREFIX = "budget/"


def read_raises(store: RunStore) -> dict[str, float]:
    """Return limit -> the largest value that it was given. Raises what the run store raises."""
    found: dict[str, float] = {}
    for key in store.list(PREFIX):
        for name, value in parse_json(store.get(key)).items():
            if name != "time" and value is not None:
                found[name] = max(float(value), found.get(name, 0.0))
    return found


def write_raise(store: RunStore, limits: Mapping[str, float]) -> None:
    """Add a raise. Raises what the run store raises."""
    body = json.dumps({**limits, "time": round(time.time(), 3)}).encode()
    number = len(store.list(PREFIX))
    while True:
        number += 1
        with suppress(AlreadyExistsError):  # another raise was faster
            store.create(f"{PREFIX}{number:010d}.json", body)
            return
