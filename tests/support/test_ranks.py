"""The processes that other tests run in: what they promise, seen from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import runs
from tests.support.ranks import (
    MAX_RANKS,
    ROOT,
    RankContext,
    RanksError,
    Server,
    expect,
    rank_values,
    ranks,
    run_ranks,
    wait_until,
)


@ranks(2)
def test_ranks_meet_and_reduce(rank: RankContext) -> None:
    import torch
    import torch.distributed as dist

    rank.init_torch_world()
    x = torch.full((3,), float(rank.rank + 1))
    dist.all_reduce(x)
    assert x.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(("n", "word"), [(1, "a"), (3, "b")])
@ranks("n")
def test_parametrized_arguments_arrive(rank: RankContext, n: int, word: str) -> None:
    assert rank.world_size == n
    assert word == {1: "a", 3: "b"}[n]


def check_squares(values: list[Any], tmp_path: Path) -> None:
    assert values == [[0, str(tmp_path)], [1, str(tmp_path)], [4, str(tmp_path)]]


@ranks(3, check=check_squares)
def test_values_come_back_and_fixtures_go_in(rank: RankContext, tmp_path: Path) -> list[Any]:
    assert tmp_path.is_dir()
    return [rank.rank**2, str(tmp_path)]


@ranks(3, dies={1: "SIGKILL", 2: 7})
def test_expected_deaths_are_no_failure(rank: RankContext) -> None:
    rank.barrier("all here")
    if rank.rank == 1:
        rank.kill(1)
    if rank.rank == 2:
        sys.exit(7)


def talk_then_fail(rank: RankContext) -> None:
    print(f"hello from {rank.rank}")
    print("and on stderr", file=sys.stderr)
    if rank.rank == 1:
        seen = {"answer": 41}
        assert seen["answer"] == 42


def test_a_failure_shows_every_log_and_exit_code_and_the_assert_s_values() -> None:
    with pytest.raises(RanksError) as caught:
        rank_values(talk_then_fail, 2)
    text = str(caught.value)
    assert text.startswith("rank 0: exit 0, rank 1: exit 1")
    for part in ("hello from 0", "hello from 1", "and on stderr", "assert 41 == 42"):
        assert part in text


def test_an_expected_death_that_does_not_come_is_a_failure() -> None:
    results = run_ranks(talk_then_fail, 1, dies={0: "SIGKILL"})
    with pytest.raises(RanksError, match="rank 0: exit 0"):
        expect(results, {0: "SIGKILL"})


def hang_in_a_named_place(rank: RankContext) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    (rank.folder / f"child{rank.rank}").write_text(str(child.pid))
    threading.Event().wait()


def test_past_the_deadline_stacks_are_shown_and_whole_groups_are_killed(tmp_path: Path) -> None:
    results = run_ranks(hang_in_a_named_place, 2, deadline=1.0, folder=tmp_path)
    assert [r.ended for r in results] == ["SIGKILL (deadline)"] * 2
    assert all("in hang_in_a_named_place" in r.log for r in results)
    for rank in range(2):
        assert not runs(int((tmp_path / f"rank{rank}.pid").read_text()))
        child = int((tmp_path / f"child{rank}").read_text())
        wait_until(lambda pid=child: not runs(pid), what="the grandchild's end")  # type: ignore[misc]


def leave_a_child_behind(rank: RankContext) -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


def test_what_a_finished_rank_left_running_is_ended() -> None:
    (child,) = rank_values(leave_a_child_behind, 1)
    wait_until(lambda: not runs(child), what="the grandchild's end")


def wait_for_a_peer_that_fails(rank: RankContext) -> None:
    if rank.rank == 1:
        raise ValueError("broken")
    rank.wait_mark("never", 1, seconds=1000)


def test_peers_of_a_failed_rank_do_not_wait_for_the_deadline() -> None:
    results = run_ranks(wait_for_a_peer_that_fails, 2, deadline=1000)
    assert [r.ended for r in results] == ["SIGKILL (peer failed)", "exit 1"]
    assert "ValueError: broken" in results[1].log


def count_myself(rank: RankContext, book: Path, together: int) -> None:
    def write(line: bytes) -> None:
        file = os.open(book, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line)
        os.close(file)

    write(b"+\n")
    wait_until(lambda: book.read_text().count("+") >= together, what="enough ranks to start")
    write(b"-\n")


def test_never_more_than_the_bound_however_many_ask(tmp_path: Path) -> None:
    book = tmp_path / "book"
    sizes = [4, 4, 3, 4, 2, 4, 3]
    together = 5  # whichever two calls come first, they must really run at the same time
    args = {"book": book, "together": together}
    failures: list[BaseException] = []

    def call(n: int) -> None:
        try:
            rank_values(count_myself, n, args)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(n,)) for n in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    alive, most = 0, 0
    for line in book.read_text().split():
        alive += 1 if line == "+" else -1
        most = max(most, alive)
    assert book.read_text().count("+") == sum(sizes)
    assert most <= MAX_RANKS


def stay(rank: RankContext) -> None:
    rank.mark("here")
    threading.Event().wait()


CLIENT = """
import sys
from pathlib import Path
from tests.support.ranks import run_ranks
from tests.support.test_ranks import stay
run_ranks(stay, 2, folder=Path(sys.argv[1]), deadline=1000)
"""


def pids_of(folder: Path, n: int) -> list[int]:
    for rank in range(n):
        wait_until((folder / f"here.{rank}.mark").exists, what=f"rank {rank}")
    return [int((folder / f"rank{rank}.pid").read_text()) for rank in range(n)]


def test_ranks_end_with_the_test_process_that_asked(tmp_path: Path) -> None:
    client = subprocess.Popen([sys.executable, "-c", CLIENT, str(tmp_path)], cwd=ROOT)
    pids = pids_of(tmp_path, 2)
    client.kill()
    client.wait()
    wait_until(lambda: not any(map(runs, pids)), what="the ranks' end")


OWNER = """
import sys
from pathlib import Path
from tests.support.ranks import Server, run_ranks
from tests.support.test_ranks import stay
server = Server(bare=True)
Path(sys.argv[1], "server").write_text(f"{server.process.pid} {server.folder}")
run_ranks(stay, 1, folder=Path(sys.argv[1]), deadline=1000, address=server.address)
"""


@pytest.mark.parametrize("victim", ["owner", "server"])
def test_server_and_ranks_end_with_their_owner(tmp_path: Path, victim: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    pids = pids_of(tmp_path, 1)
    server, _, folder = (tmp_path / "server").read_text().partition(" ")
    os.kill(owner.pid if victim == "owner" else int(server), signal.SIGKILL)
    wait_until(lambda: not any(map(runs, [int(server), *pids])), 10, "their end")
    owner.wait(120)  # a client whose server has exited does not wait either
    subprocess.run(["rm", "-rf", folder], check=True)


def test_what_cannot_be_run_is_refused() -> None:
    def local(rank: RankContext) -> None: ...

    with pytest.raises(ValueError, match="17 ranks: 1 to 16 are possible"):
        run_ranks(stay, 17)
    with pytest.raises(ValueError, match="must stand at the top level"):
        run_ranks(local, 1)
    with pytest.raises(TypeError, match="simple values only"):
        run_ranks(stay, 1, {"rank": object()})


def test_a_closed_server_leaves_nothing() -> None:
    server = Server()
    server.close()
    assert server.process.returncode == 0
    assert not server.folder.exists()
