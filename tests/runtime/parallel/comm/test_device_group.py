"""Groups over a backend that hangs where gloo raises: who ends their waits, and what is left."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from holdfast.core.device_progress import GroupProgress
from holdfast.core.devices import DEVICES
from holdfast.errors import DeviceStuckError, PeerLostError, UserError
from holdfast.parallel.comm import device_group, devices
from holdfast.parallel.comm.abortable_wait import AbortableWait
from holdfast.parallel.comm.device_group import DeviceGroup
from holdfast.parallel.comm.devices import describe_device, select_device
from holdfast.parallel.comm.transport import PeerGroup
from tests.support import fake_nccl
from tests.support.processes import runs
from tests.support.ranks import RankContext, ranks, wait_until

CPU = torch.device("cpu")


def joined(rank: RankContext, name: str) -> DeviceGroup:
    fake_nccl.install()
    made = DeviceGroup(
        fake_nccl.NAME, rank.store(name), name, rank.rank, rank.world_size, CPU, seconds=60.0
    )
    made.open(lambda: False)
    return made


@pytest.mark.slow
@ranks(3, dies={2: "SIGKILL"})
def test_a_lost_peer_is_not_reported_and_an_abort_leaves_garbage(rank: RankContext) -> None:
    group, sums = joined(rank, "first"), torch.ones(4)
    work: Any = group.all_reduce(sums)
    work.wait()
    assert sums.tolist() == [3.0] * 4
    rank.barrier("summed")
    if rank.rank == 2:
        rank.kill(2)
    late = torch.ones(4)
    work = group.all_reduce(late)
    waiting = threading.Thread(target=work.wait, daemon=True)
    waiting.start()
    pid = rank.pid(2)
    wait_until(lambda: not runs(pid), what="the loss")
    waiting.join(0.3)
    assert waiting.is_alive(), "somebody has told of the loss"
    group.abort()
    waiting.join(120)
    assert not waiting.is_alive()
    assert late.tolist() != [2.0] * 4
    with pytest.raises(PeerLostError, match="given up"):
        group.all_reduce(late)
    group.close()


@ranks(2)
def test_messages_of_a_pair_match_in_their_order(rank: RankContext) -> None:
    group = joined(rank, "pair")
    if rank.rank == 0:
        for number in range(3):
            group.send(torch.full((2,), float(number)), 1, "pp")
        rank.wait_mark("done", 1)
    else:
        got = [torch.empty(2) for _ in range(3)]
        works: list[Any] = [group.receive(each, 0) for each in got]
        for work in works:
            work.wait()
        assert [each[0].item() for each in got] == [0.0, 1.0, 2.0]
        rank.mark("done")
    group.close()


@ranks(2)
def test_a_peer_that_never_comes_costs_the_process_that_waits(rank: RankContext) -> None:
    """A creation that hangs cannot be ended. So the group is given up, and the device is stuck."""
    if rank.rank == 1:
        rank.wait_mark("seen", 0)
        return
    fake_nccl.install()
    device_group.ABORT_TIMEOUT_S = 0.2
    group = DeviceGroup(fake_nccl.NAME, rank.store(), "late", 0, 2, CPU, seconds=30.0)
    with pytest.raises(PeerLostError, match="given up while it was made"):
        group.open(lambda: True)
    with pytest.raises(DeviceStuckError, match="not given up within"):
        group.close()
    rank.mark("seen")


@ranks(2)
def test_a_devices_tensors_travel_over_gloo_through_the_host(rank: RankContext) -> None:
    """The copies are those of a device; here both memories are the host's."""
    peers = PeerGroup(rank.store(), "staged", rank.rank, 2, staged_type="cpu")
    mine, theirs = torch.full((3,), float(rank.rank)), torch.empty(3)
    work = peers.receive(theirs, 1 - rank.rank, 20)
    peers.send(mine, 1 - rank.rank, 20)
    mine.fill_(9.0)  # it has left already
    work.wait()
    assert theirs.tolist() == [1.0 - rank.rank] * 3
    both = torch.empty(2)
    peers.all_gather(both, torch.tensor([float(rank.rank)])).wait()
    swapped = torch.empty(2)
    peers.all_to_all(swapped, both + 10.0 * rank.rank, [1, 1], [1, 1]).wait()
    total = torch.tensor([float(1 + rank.rank)])
    peers.all_reduce(total).wait()
    assert (both.tolist(), total.item()) == ([0.0, 1.0], 3.0)
    assert swapped.tolist() == [float(rank.rank), 10.0 + rank.rank]


@ranks(2)
def test_a_lane_counts_what_the_device_has_reached(rank: RankContext) -> None:
    group = joined(rank, "counted")
    lane, sums = group.lane(AbortableWait(lambda errand: None, "counted")), torch.ones(2)

    def exchange() -> None:
        lane.wait(group.all_reduce(sums))

    lane.run(exchange)
    lane.finish()
    assert group.progress() == GroupProgress("counted", 1, 1, 1)
    if rank.rank == 1:
        fake_nccl.hang_kernels()
    lane.run(exchange)
    there = GroupProgress("counted", 2, 2 - rank.rank, 1)
    wait_until(lambda: group.progress() == there, what="the device to come to the exchange")
    rank.barrier("seen")
    assert group.progress() == there
    group.abort()


def test_a_worker_selects_its_device_before_the_first_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(torch.cuda, "init", lambda: chosen.append(-1))
    select_device(CPU)
    assert not chosen
    select_device(torch.device("cuda:1"))
    assert chosen == [1, -1]
    with pytest.raises(UserError, match="was given cuda:2, but torch sees 2 of cuda"):
        select_device(torch.device("cuda:2"))


def test_the_journal_names_device_and_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"nccl": "2.28.9"}
    monkeypatch.setattr(devices, "backend_version", lambda name: versions.get(name, ""))
    assert describe_device(CPU, DEVICES["cpu"]) == "cpu, gloo"
    assert describe_device(torch.device("cuda:1"), DEVICES["cuda"]) == "cuda:1, nccl 2.28.9"
    assert describe_device(torch.device("xpu:0"), DEVICES["xpu"]) == "xpu:0, gloo, xccl"
    assert DEVICES["xpu"].between_has_tags
