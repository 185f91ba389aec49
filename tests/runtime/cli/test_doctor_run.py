"""`holdfast doctor RUN` on runs that have ended or are broken; nothing of the run changes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.run import RunConfig
from holdfast.doctor import deadline as doctor_deadline
from holdfast.doctor import store as doctor_store
from holdfast.doctor.deadline import Deadlines
from holdfast.doctor.nodes import check_links, check_memory, check_nodes, needs_by_node
from holdfast.doctor.run import diagnose_run, missing_node_checks
from holdfast.doctor.state import check_devices
from holdfast.doctor.store import check_store
from holdfast.elastic.protocol.node_check import LinkResult, NodeCheckReply, NodeMemory
from holdfast.events import Record, WorkerReady
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.node_checks import AgentAnswer
from holdfast.layout import Layout, place_layout
from holdfast.wire.term import HolderReply
from tests.runtime.cli.conftest import Trained
from tests.support.commands import within
from tests.support.memory_store import MemoryStore
from tests.support.nodes import nodes_of, prepared
from tests.support.ranks import ROOT

GIB = 2**30


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Copies of the golden run folders, among the dataset that they need."""
    shutil.copytree(ROOT / "tests" / "golden" / "runs", tmp_path / "runs")
    os.chdir(tmp_path / "runs")
    return tmp_path / "runs"


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def rows(folder: Path, code: int) -> dict[str, Any]:
    found = within("doctor", folder, "--json")
    assert found.code == code, found.out + found.err
    value = json.loads(found.out)
    return {check["name"]: check for check in value["checks"]} | {"all": value}


def test_an_ended_run_is_described_and_stays_as_it_was(runs: Path) -> None:
    before = contents(runs / "nodes")
    found = rows(runs / "nodes", 0)
    assert contents(runs / "nodes") == before
    assert "finished after step 12" in found["run"]["found"]
    assert found["last checkpoint"]["where"].startswith("commits/")
    assert found["run store"]["state"] == found["hard links"]["state"] == "good"
    store = found["all"]["store"]
    assert min(store["create_s"], store["append_s"], store["write_bytes_per_s"]) > 0
    assert found["all"]["next_checkpoint_bytes"] > 100_000
    assert found["all"]["step"] == found["all"]["checkpoint_step"] == 12
    text = within("doctor", runs / "nodes").out
    assert text.startswith(str(runs / "nodes"))
    assert "the next checkpoint takes 139.1 KiB" in text


def test_a_killed_run_is_told_from_one_that_trains(runs: Path) -> None:
    """Its term is open; nothing grows in it."""
    found = diagnose_run(runs / "cut", HolderWatch(runs / "cut", quiet_s=0.5))
    checks = {check.name: check for check in found.checks}
    assert checks["run"].state == "weak"
    assert "interrupted after step 5" in checks["run"].found
    assert "2 steps since" in checks["last checkpoint"].found
    assert not found.will_fail


def test_a_run_that_stopped_is_not_watched_for_life(runs: Path) -> None:
    """Several nodes leave a term open; the journal says that the run has stopped."""
    for closed in (runs / "halfway" / "terms").glob("*-closed.json"):
        closed.unlink()
    said: list[str] = []
    found = diagnose_run(runs / "halfway", HolderWatch(runs / "halfway", said.append))
    assert "stopped after step 5" in found.checks[0].found
    assert said == []


def test_each_broken_part_is_named_with_its_place(runs: Path) -> None:
    folder = runs / "halfway"
    for commit in (folder / "commits").iterdir():
        commit.write_bytes(commit.read_bytes()[:-40])
    segment = folder / "journal" / "0000000001" / "rank0.jsonl"
    segment.write_bytes(b"nonsense\n" + segment.read_bytes())
    (folder / "secret").write_text("00" * 32)
    (folder / "secret").chmod(0o644)
    shutil.rmtree(runs / "dataset")
    found = rows(folder, 1)
    assert found["checkpoint"]["state"] == "fails"
    assert found["checkpoint"]["where"].startswith("commits/")
    assert "holdfast checkpoint verify" in found["checkpoint"]["remedy"]
    assert found["journal"]["where"] == "journal/0000000001/rank0.jsonl, line 1"
    assert found["secret"]["state"] == "fails"
    assert found["dataset"]["state"] == "fails"
    for name in ("checkpoint", "journal", "secret", "dataset"):
        assert found[name]["remedy"], name
    (folder / "resolved.json").write_text("[]")
    found = rows(folder, 1)
    assert found["run file"]["where"].endswith("resolved.json")
    assert found["run store"]["state"] == "good", "the remaining parts are checked"


def test_a_full_disk_fails_before_the_next_checkpoint(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage

    def nearly_full(folder: Any) -> Any:
        return real(folder)._replace(free=100_000)

    monkeypatch.setattr(doctor_store.shutil, "disk_usage", nearly_full)
    found = rows(runs / "halfway", 1)["free space"]
    assert found["state"] == "fails"
    assert "97.7 KiB free; the next checkpoint takes 139.1 KiB" in found["found"]
    assert "holdfast checkpoint prune" in found["remedy"]


class Overwriting(MemoryStore):
    """It accepts a second writer of a key, as some servers of buckets do."""

    def create(self, key: str, data: Any) -> None:
        self.delete(key)
        super().create(key, data)


def test_a_bucket_is_tried_too() -> None:
    good = check_store(MemoryStore(), "checkpoint.bucket", "bucket")
    assert {check.state for check in good.checks} == {"good"}
    assert good.figures["write_bytes_per_s"] > 0
    (bad,) = check_store(Overwriting(), "checkpoint.bucket", "bucket").checks
    assert (bad.state, bad.where) == ("fails", "checkpoint.bucket")
    assert "overwrites what is there" in bad.found


def test_no_run_is_bad_input(tmp_path: Path) -> None:
    within("doctor", tmp_path).refuses(str(tmp_path), "no run here", "holdfast train")
    within("doctor", tmp_path / "none").refuses("no run here")


def test_devices_and_what_carries_their_data_are_named() -> None:
    def ready(generation: int, rank: int, device: str) -> Record:
        return Record(generation, f"rank{rank}", 0, 0.0, WorkerReady(rank, 1.0, device))

    card = "nccl 2.29.7, InfiniBand and NVLink"
    records = [ready(1, 5, f"cuda:5, {card}"), ready(1, 6, "")]
    records += [ready(2, rank, f"cuda:{rank % 2}, {card}") for rank in range(4)]
    assert [check.found for check in check_devices(records)] == [
        f"rank 0, 2: cuda:0, {card}",
        f"rank 1, 3: cuda:1, {card}",
    ]
    many = [ready(2, rank, "cpu, gloo") for rank in range(9)]
    assert [check.found for check in check_devices(many)] == ["9 ranks: cpu, gloo"]
    assert check_devices([]) == []


def test_memory_that_does_not_suffice_is_found_before_a_start() -> None:
    config = RunConfig.model_validate({"model": {"vocab_size": 50_000}, "layout": {"workers": 2}})
    topology = place_layout(Layout(dp_shard=2), 1, ("a", "b"))
    need = needs_by_node(config, topology)["a"]
    assert need.ranks == 1
    assert need.snapshots > 0
    for total, state in (
        (100 * GIB, "good"),
        (int((need.state + need.snapshots) * 1.1), "weak"),
        (need.state, "fails"),
    ):
        memory = NodeMemory(total, total)
        (check,) = check_memory(config, topology, {"a": memory}, lives=False)
        assert (check.name, check.state) == ("memory of a", state)


def test_nodes_and_links_that_do_not_work_are_named() -> None:
    memory = NodeMemory(GIB, GIB)
    links = {"b": LinkResult("silent"), "c": LinkResult("listens", 0.0004)}
    reply = NodeCheckReply("training", 7, 5, memory, links, ("d",))
    assert NodeCheckReply.from_json(reply.to_json()) == reply
    answers = {
        "a": AgentAnswer("10.0.0.1:7", HolderReply.LIVES, 0.0008, reply),
        "b": AgentAnswer("10.0.0.2:7", HolderReply.REFUSED),
        "c": AgentAnswer("10.0.0.3:7", HolderReply.UNSIGNED),
    }
    nodes = {check.name: check for check in check_nodes(None, answers)}
    assert nodes["node a"].state == "good"
    assert "round trip 800 µs" in nodes["node a"].found
    assert nodes["node b"].state == nodes["node c"].state == "fails"
    assert "HOLDFAST_SECRET_FILE" in nodes["node c"].remedy
    (spare,) = missing_node_checks("runs/a", None, None, answers, {})
    assert (spare.name, spare.state) == ("node d", "good")
    assert "waits as a spare" in spare.found
    config = RunConfig.model_validate({"layout": {"workers": 3}})
    topology = place_layout(Layout(dp_replicate=2), 1, ("a", "c"))
    lost = {"a": (0.0, "exit 1"), "b": (time.time(), "silent"), "d": (0.0, "exit 1")}
    workers, joined, away = missing_node_checks("runs/a", config, topology, answers, lost)
    assert (workers.state, workers.found) == ("weak", "2 of 3 train")
    assert "holdfast join runs/a" in workers.remedy
    assert "has joined" in joined.found
    assert (away.name, away.state) == ("node b", "weak")
    assert "silent" in away.found
    cut, good = check_links(answers)
    assert (cut.name, cut.state, cut.where) == ("link a to b", "fails", "10.0.0.2:7")
    assert "no packet arrives" in cut.found
    assert (good.name, good.found) == ("links of a", "c 400 µs")


def test_a_run_of_an_older_folder_can_be_named_by_its_run_file(trained: Trained) -> None:
    found = within("doctor", trained.run_file)
    assert found.code == 0, found.out
    assert "finished after step 6" in found.out


def test_a_check_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_deadline, "AFTER_HANG_S", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    within = Deadlines(tmp_path)
    assert within.run("size", 60, lambda: len("four"), 0) == 4
    for name in ("one", "two"):  # no process writes into the pipe
        assert within.run(name, 0.1, pipe.read_text, "hung") == "hung"
    assert [check.name for check in within.hung] == ["one", "two"]
    assert "no answer in" in within.hung[0].found
    with pytest.raises(FileNotFoundError):
        within.run("three", 60, (tmp_path / "none").read_text, "")


LOOK_AT_A_HUNG_RUN = """
import pathlib, sys
from tests.support.commands import within
from tests.support.faulty_disk import FaultyDisk
folder, point = map(pathlib.Path, sys.argv[1:])
disk = FaultyDisk(folder, point)
assert within("doctor", point).code == 0
disk.order("hang")
found = within("doctor", point)
disk.order("well")
disk.close()
print(found.code, found.out)
"""


@pytest.mark.slow
def test_a_run_on_a_disk_that_hangs_is_reported(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "point").mkdir()
    script = [sys.executable, "-c", LOOK_AT_A_HUNG_RUN, runs / "nodes", tmp_path / "point"]
    command = ["unshare", "-Urm", "--propagation", "private", *script]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 "), done.stdout
    assert "FAIL  run folder  no answer in" in done.stdout


@pytest.mark.slow
def test_nodes_that_train_are_asked(tmp_path: Path) -> None:
    """Two nodes answer with their memory and their link; one is killed, and is then missed."""
    run_file = prepared(tmp_path)
    with nodes_of(
        run_file, tmp_path / "run", "train.steps=100000", "checkpoint.every_steps=20"
    ) as it:
        it.start("a")
        it.wait_generation({"a"})
        it.start("b")
        it.wait_step(25, nodes={"a", "b"})
        found = rows(tmp_path / "run", 0)
        assert found["node a"]["state"] == found["node b"]["state"] == "good"
        assert "round trip" in found["node b"]["found"]
        assert found["links of a"]["found"].startswith("b ")
        assert found["memory of b"]["state"] == "good"
        assert found["all"]["lives"]
        assert found["all"]["step_age_seconds"] < 60
        by_node = {row["node"]: row for row in found["all"]["nodes"]}
        assert by_node["b"]["check"]["links"]["a"]["outcome"] == "listens"
        it.signal("b", signal.SIGSTOP)
        try:
            silent = diagnose_run(tmp_path / "run", HolderWatch(tmp_path / "run"))
        finally:
            it.signal("b", signal.SIGCONT)
        assert {check.name for check in silent.checks if check.state == "fails"} >= {"node b"}
        for name in ("a", "b"):
            it.signal(name, signal.SIGINT)
        it.end()
    assert "stopped after step" in within("doctor", tmp_path / "run").out
