"""What torch's flight recorder has of a backend's operations that have not ended: text for a log.

The recorder writes JSON about this process. Nothing here reads what another process wrote.
"""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

from torch._C import _distributed_c10d

logger = logging.getLogger(__name__)

DUMP_TIMEOUT_S = 0.5
"""Seconds that a dump may delay the caller. It waits for a lock of the backend's watchdog."""
_MAX_LINES = 20


def log_pending_operations() -> None:
    """Write the operations that have not ended into this process's log; return soon in any case."""
    thread = threading.Thread(target=_log_pending, name="flight recorder", daemon=True)
    thread.start()
    thread.join(DUMP_TIMEOUT_S)


def _log_pending() -> None:
    for line in describe_pending(_dump())[:_MAX_LINES]:
        logger.warning("has not ended: %s", line)


def _dump() -> str:
    """Return the recorder's content as JSON; "" if this torch has none."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump: Any = getattr(_distributed_c10d, name, None)
        if dump is not None:
            return bytes(dump(includeCollectives=True, onlyActive=True)).decode("utf-8", "replace")
    return ""


def describe_pending(text: str) -> list[str]:
    """Return a line for each operation in the recorder's JSON that has not ended, oldest first."""
    entries = json.loads(text).get("entries", []) if text else []
    open_ones = (each for each in entries if not each.get("retired"))
    return [_describe(each) for each in open_ones if each.get("state") != "completed"]


def _describe(entry: dict[str, Any]) -> str:
    is_message = entry.get("is_p2p")
    number = entry.get("p2p_seq_id" if is_message else "collective_seq_id", 0)
    name, purpose = [*entry.get("process_group", []), "", ""][:2]
    group = f"group {name} ({purpose})" if purpose not in ("", "undefined") else f"group {name}"
    what, sizes, state = (entry.get(key) for key in ("profiling_name", "input_sizes", "state"))
    return f"{what} number {number} of {group}, {sizes}: {state}"
