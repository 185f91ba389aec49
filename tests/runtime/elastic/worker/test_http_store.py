"""The rendezvous store against torch's own, and under real process groups."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from holdfast.wire.http.client import Client
from tests.support.control_server import SECRET, controlling
from tests.support.ranks import RankContext, rank_values


def _store(address: str, seconds: float = 30, generation: int = 1) -> Any:
    from holdfast.elastic.worker.http_store import HttpStore

    return HttpStore(Client(address, SECRET, generation), timedelta(seconds=seconds))


def worlds(rank: RankContext, address: str) -> list[float]:
    """gloo, a 2 x 2 DeviceMesh and FSDP2's first collective, without a TCPStore."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    store = _store(address)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("1/world", store),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=120),
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    out = []
    for group in (None, mesh.get_group("row"), mesh.get_group("column")):
        value = torch.tensor(10.0**rank.rank)
        dist.all_reduce(value, group=group)
        out.append(value.item())
    objects: list[Any] = [None] * rank.world_size
    dist.all_gather_object(objects, rank.rank)
    assert objects == [0, 1, 2, 3]
    dist.barrier()
    dist.destroy_process_group()
    return out


def test_process_groups_and_a_mesh_meet_through_it() -> None:
    with controlling() as control:
        values = rank_values(worlds, 4, {"address": control.address})
    rows = {0: 101.0, 1: 1010.0, 2: 101.0, 3: 1010.0}
    columns = {0: 11.0, 1: 11.0, 2: 1100.0, 3: 1100.0}
    assert values == [[1111.0, rows[r], columns[r]] for r in range(4)]


def bare_groups(rank: RankContext, address: str) -> list[Any]:
    """Two groups, in one request each; a value that never comes ends in time."""
    import pytest
    import torch
    from torch.distributed import DistStoreError  # type: ignore[attr-defined]

    from holdfast.parallel.comm.transport import PeerGroup, exchange

    store = _store(address)
    asked: list[str] = []
    plain = store._ask

    def ask(request: Any, *arguments: Any) -> Any:
        asked.append(request.op)
        return plain(request, *arguments)

    store._ask = ask
    size = rank.world_size
    groups = [PeerGroup(store, name, rank.rank, size, seconds=120) for name in ("g1/a", "g1/b")]
    said = [
        int(record)
        for peers in groups
        for record in exchange(peers, torch.tensor([rank.rank]), [1] * size, 1)
    ]
    if rank.rank == 0:
        with pytest.raises(DistStoreError):
            store.gather("mine", b"1", ["mine", "never"], timedelta(milliseconds=50))
        asked.pop()
    return [said, asked]


def test_a_group_meets_in_one_request_of_each_rank() -> None:
    with controlling() as control:
        values = rank_values(bare_groups, 3, {"address": control.address})
    assert values == [[[0, 1, 2, 0, 1, 2], ["gather", "gather"]]] * 3


def same_answers(rank: RankContext, address: str) -> None:
    """Every operation in turn, on torch's HashStore and on ours."""
    import torch.distributed as dist

    ours, theirs = _store(address), dist.HashStore()
    script: list[tuple[str, tuple[Any, ...]]] = [
        ("set", ("a", "1")),
        ("get", ("a",)),
        ("set", ("a", "two")),
        ("get", ("a",)),
        ("add", ("n", 5)),
        ("add", ("n", -2)),
        ("get", ("n",)),
        ("add", ("m", 0)),
        ("check", (["a", "n"],)),
        ("check", (["a", "z"],)),
        ("compare_set", ("c", "", "x")),
        ("compare_set", ("c", "x", "y")),
        ("compare_set", ("c", "x", "z")),
        ("get", ("c",)),
        ("compare_set", ("d", "q", "r")),
        ("check", (["d"],)),
        ("num_keys", ()),
        ("delete_key", ("a",)),
        ("delete_key", ("a",)),
        ("check", (["a"],)),
        ("num_keys", ()),
        ("set", ("empty", "")),
        ("get", ("empty",)),
        ("set", ("bytes", "\x00\x7f")),
        ("get", ("bytes",)),
        ("append", ("log", "one")),
        ("append", ("log", "two")),
        ("get", ("log",)),
        ("wait", (["log", "n"],)),
        ("multi_get", (["log", "n"],)),
    ]
    for name, arguments in script:
        expected, got = getattr(theirs, name)(*arguments), getattr(ours, name)(*arguments)
        assert expected == got, (name, arguments, expected, got)


def test_it_answers_as_torchs_own_store_does() -> None:
    with controlling() as control:
        rank_values(same_answers, 1, {"address": control.address})


def waits(rank: RankContext, address: str) -> None:
    import pytest
    import torch.distributed as dist

    from holdfast.errors import FencedError

    store = _store(address)
    for waiting in (
        lambda: _store(address, 0.1).get("never"),
        lambda: store.wait(["never"], timedelta(seconds=0.1)),
    ):
        with pytest.raises(dist.DistStoreError, match="never"):
            waiting()
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(store.get("later")))
    thread.start()
    store.set("later", "now")
    thread.join(120)
    assert got == [b"now"]
    # Blocked until the test opens generation 2.
    rank.mark("waiting")
    with pytest.raises(FencedError):
        store.get("never")
    with pytest.raises(FencedError):
        store.set("never", "too late")
    newer = _store(address, generation=2)
    assert not newer.check(["later"])
    assert newer.num_keys() == 0


def test_waits_end_by_a_key_a_deadline_or_a_newer_generation(tmp_path: Any) -> None:
    with controlling() as control:
        failures: list[BaseException] = []

        def run() -> None:
            try:
                rank_values(waits, 1, {"address": control.address}, folder=tmp_path)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        RankContext(0, 1, tmp_path).wait_mark("waiting", 0, 60)
        control.begin(2)
        thread.join(120)
    assert failures == []


def test_an_operation_that_arrives_twice_happens_once() -> None:
    with controlling() as control:
        client = Client(control.address, SECRET, 1)
        add = {"op": "add", "key": "n", "amount": 1}
        answers = [client.post("/store", add | {"id": i}) for i in ("a", "a", "b", "a", "b")]
        assert [a["value"] for a in answers] == ["MQ==", "MQ==", "Mg==", "MQ==", "Mg=="]
