"""The share of copies that is hidden, from the threads that copy to what a person reads."""

from __future__ import annotations

import threading

import pytest

from holdfast.events import MemoryUsed, Record
from holdfast.report.live.metrics import RunMetrics
from holdfast.training.memory.transfers import LOADS, STORES, WAITED, TransferAccount


def test_a_lane_does_not_hide_another_one() -> None:
    """Two lanes copy at once while nothing else is done: nothing is hidden."""
    account, both = TransferAccount(), threading.Barrier(3, timeout=60)
    release = threading.Event()

    def copy(slot: int) -> None:
        with account.timed({"optimizer": 300, "gradients": 100}, slot):
            both.wait()
            release.wait(60)

    threads = [threading.Thread(target=copy, args=(slot,)) for slot in (LOADS, STORES)]
    with account.timed({"optimizer": 300, "gradients": 100}, WAITED):
        for thread in threads:
            thread.start()
        both.wait()
        release.set()
        for thread in threads:
            thread.join()
    found = account.take()
    assert account.take() == {}
    assert found["optimizer"][0] == 600
    assert found["optimizer"][1] == pytest.approx(3 * found["gradients"][1])  # by bytes
    for _, copied, waited in found.values():
        assert waited >= copied


def test_metrics_tell_the_share_of_all_samples() -> None:
    metrics = RunMetrics("r")
    for number, waited in enumerate((0.5, 0.0)):
        used = MemoryUsed(0, 1, transfers={"optimizer": [10, 1.0, waited]}, step=number + 1)
        metrics.observe(Record(1, "a", number, float(number), used))
    line = 'holdfast_transfers_hidden_ratio{run_id="r",state="optimizer"} 0.75'
    assert line in metrics.render().decode()
