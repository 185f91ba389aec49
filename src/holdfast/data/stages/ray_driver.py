"""The process of a preparation that speaks to a Ray cluster (`ray_pool.py` starts it).

    python -m holdfast.data.stages.ray_driver ADDRESS

Ray Data gives each task to a worker of the cluster. A task's row has all that it needs but the
sources, and its result comes back as bytes. So only the sources have to be on a disk that all
machines of the cluster share. If a worker or its machine is lost, Ray does the task again: the
result is the same.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from holdfast.data.read.files import write_atomic
from holdfast.data.stages.ray_tasks import perform_rows, versions

CONNECT_TIMEOUT_S = 5.0


class RefusalError(Exception):
    """The cluster cannot be used. kind: absent or unreachable."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind, self.detail = kind, detail
        super().__init__(detail)


def main() -> None:
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer

    def answer(value: dict[str, Any]) -> None:
        answer_to.write(json.dumps(value) + "\n")
        answer_to.flush()

    try:
        ray = connect(sys.argv[1])
        answer({})
        for line in sys.stdin:
            for found in run(ray, json.loads(line)):
                answer(found)
    except RefusalError as refusal:
        answer({"refused": refusal.kind, "detail": refusal.detail})
    except Exception as error:
        answer({"refused": "failed", "detail": _in_short(error)})


def connect(address: str) -> Any:
    """Connect to the cluster; return the module ray. Raises RefusalError."""
    host, _, port = address.rpartition(":")
    if host and "://" not in address:
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except (OSError, ValueError) as error:
            raise RefusalError("unreachable", str(error)) from None
    try:
        ray: Any = import_module("ray")
        import_module("ray.data")
    except ImportError as error:
        raise RefusalError("absent", str(error)) from None
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        here = {"_node_ip_address": own} if (own := _own_address(address)) else {}
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **here)
    except Exception as error:  # Ray has no common class of its errors
        raise RefusalError("unreachable", _in_short(error)) from None
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    return ray


def _own_address(address: str) -> str:
    """The address of Ray's node on this machine; empty where Ray finds it by itself. Several nodes
    on one machine have addresses that Ray does not look for."""
    head = address.rpartition(":")[0]
    here = {a.address for found in psutil.net_if_addrs().values() for a in found}
    return head if head.startswith("127.") and head not in here else ""


def run(ray: Any, tasks: list[dict[str, Any]]) -> Any:
    """Yield an answer for each task that is done, in any order."""
    rows = [_row(number, task) for number, task in enumerate(tasks)]
    tokenizers = {str(task["tokenizer"]) for task in tasks if "tokenizer" in task}
    tokenizer = ray.put(Path(tokenizers.pop()).read_bytes()) if tokenizers else None
    perform = partial(perform_rows, tokenizer=tokenizer, versions=versions())
    done = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        perform, batch_size=1, batch_format="numpy", num_cpus=1
    )
    for row in done.iter_rows():
        if row["error"]:
            yield {"error": json.loads(row["error"])}
            return
        number = int(row["number"])
        write_atomic(Path(tasks[number]["out"]), [row["result"]])
        yield {"done": number}


def _row(number: int, task: dict[str, Any]) -> dict[str, Any]:
    lots = Path(task["lots"]).read_bytes() if "lots" in task else b""
    parts = [(_located(path), *cut) for path, *cut in task["unit"]["parts"]]
    task = {**task, "unit": {**task["unit"], "parts": parts}}
    return {"number": number, "task": json.dumps(task), "lots": lots}


def _located(path: str) -> str:
    """A file's path from the root; the name of a dataset on the hub as it is."""
    return os.path.abspath(path) if os.path.exists(path) else path


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"


if __name__ == "__main__":
    main()
