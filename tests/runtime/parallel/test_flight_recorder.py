"""What is read of torch's flight recorder."""

from __future__ import annotations

import json
import threading

import pytest
import torch
import torch.distributed as dist

from holdfast.parallel.comm import flight_recorder
from holdfast.parallel.comm.flight_recorder import describe_pending, log_pending_operations
from tests.support.ranks import RankContext, ranks, wait_until


def entry(name: str, state: str, **more: object) -> dict[str, object]:
    return {
        "profiling_name": name,
        "state": state,
        "collective_seq_id": 12,
        "p2p_seq_id": 3,
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "input_sizes": [[2, 4]],
        **more,
    }


def test_operations_that_have_not_ended_get_a_line() -> None:
    entries = [
        entry("nccl:all_reduce", "completed"),
        entry("gloo:all_reduce", "scheduled", retired=True),  # gloo's have no other state
        entry("nccl:_all_gather_base", "started"),
        entry("nccl:send 0->1", "scheduled", is_p2p=True, process_group=["7", "undefined"]),
    ]
    assert describe_pending(json.dumps({"entries": entries, "pg_status": {}})) == [
        "nccl:_all_gather_base number 12 of group 0 (default_pg), [[2, 4]]: started",
        "nccl:send 0->1 number 3 of group 7, [[2, 4]]: scheduled",
    ]
    assert describe_pending("") == describe_pending("{}") == []


def test_a_recorder_that_hangs_holds_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(flight_recorder, "_dump", lambda: str(over.wait() or "")[:0])
    monkeypatch.setattr(flight_recorder, "DUMP_TIMEOUT_S", 0.05)
    log_pending_operations()
    over.set()


@ranks(1)
def test_this_torchs_recorder_writes_what_is_read(rank: RankContext) -> None:
    rank.init_torch_world()
    dist.all_reduce(torch.ones(2))
    whole = flight_recorder._dump()
    assert isinstance(json.loads(whole), dict)
    # gloo's operations are struck off by a thread of their own.
    wait_until(lambda: describe_pending(flight_recorder._dump()) == [], what="no open operation")
