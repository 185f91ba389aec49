"""`launch`, `status`, `logs` and `down` with nodes that are shells: what the commands do and say.

Real agents: `tests/system/test_launch_on_owners.py`.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.cli import down as down_module
from holdfast.cli import launch as launch_module
from holdfast.cli import logs as logs_module
from holdfast.errors import RunFolderError
from holdfast.launch.owners import local
from holdfast.launch.owners.owner import OwnedJob
from holdfast.launch.run import launch_claim
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.runs import read_resolved
from holdfast.launch.start.begin import BegunRun, Start
from holdfast.wire.store.run_location import make_local_folder
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import Host, create_term
from tests.runtime.cli.conftest import Trained
from tests.runtime.launch.holders import growing
from tests.support.commands import Outcome, within
from tests.support.ranks import wait_until

AT_WORK = 'echo "at work as $0"; trap "echo leaves; exit 0" TERM; while :; do sleep 0.02; done'
Call = Callable[..., Outcome]


class Launched:
    """A run file, and nodes that are shells in place of agents. script: what they run."""

    def __init__(self, root: Path, trained: Trained) -> None:
        self.run_file, self.folder = root / "run.yaml", root / "new"
        self.run_file.write_text(
            trained.run_file.read_text()
            .replace("layout: {workers: 2}", "cluster: {places: 1}")
            .replace(f"{trained.root}/run", str(self.folder))
        )
        self.script = AT_WORK

    def command(self, module: str, *arguments: str) -> list[str]:
        return ["/bin/sh", "-c", self.script, arguments[arguments.index("--node") + 1], *arguments]

    def __call__(self, *arguments: str) -> Outcome:
        return within(arguments[0], self.run_file, *arguments[1:])

    @property
    def states(self) -> dict[str, str]:
        nodes = json.loads(self("status", "--json").out)["nodes"]
        return {each["node"]: each["state"] for each in nodes}

    def wait(self, due: Callable[[], object]) -> None:
        wait_until(due, what=lambda: f"{self.states}\n{self('logs').out}", pause_s=0.02)

    def wait_at_work(self, nodes: int) -> None:
        """Until each node answers SIGTERM itself."""
        self.wait(lambda: self("logs").out.count("at work") >= nodes)


@pytest.fixture
def launched(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Launched]:
    found = Launched(tmp_path, trained)
    monkeypatch.setattr(local, "module_command", found.command)
    monkeypatch.setattr(down_module, "WAIT_INTERVAL_S", 0.02)
    monkeypatch.setattr(logs_module, "FOLLOW_INTERVAL_S", 0.02)
    yield found
    if (found.folder / "launch.json").exists():
        assert within("down", found.folder).code == 0


def test_a_job_from_launch_to_down(launched: Launched) -> None:
    done = launched("launch", "--nodes", "2")
    assert done.code == 0, done.err
    assert "local has accepted 2 nodes" in done.err
    assert read_resolved(launched.folder)["config"]["layout"]["workers"] == 2  # type: ignore[index]
    launched.wait_at_work(2)
    assert launched.states == {"node-0": "running", "node-1": "running"}
    assert launched("status").code == 0

    again = launched("launch", "--nodes", "2", "--json", "checkpoint.every_steps=2")
    assert "nodes that start later: checkpoint.every_steps=2" in again.err
    assert "local has 2 nodes of this run already" in again.err
    assert json.loads(again.out)["nodes"] == 2
    assert launched("logs").out.count("at work") == 2, "no node was started again"

    ended = launched("down")
    assert ended.code == 0
    assert "is left; the same 'holdfast launch' again resumes the run" in ended.err
    assert launched.states == {"node-0": "finished", "node-1": "finished"}
    assert launched("status").code == 1
    assert launched("down").code == 0, "a job that has ended is no error"

    resumed = launched("launch", "--nodes", "2")
    assert "local has accepted 2 nodes" in resumed.err
    launched.wait_at_work(4)


def test_of_two_launches_at_one_moment_the_second_finds_the_job_of_the_first(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, first = launch_module.begin_run, []

    def begin_and_come_second(start: Start) -> BegunRun:
        if not first:
            first.append("")
            first[0] = launched("launch", "--nodes", "2").err
        return begin(start)

    monkeypatch.setattr(launch_module, "begin_run", begin_and_come_second)
    second = launched("launch", "--nodes", "2").err
    assert "local has accepted 2 nodes" in first[0]
    assert "local has 2 nodes of this run already" in second
    launched.wait_at_work(2)
    assert launched("logs").out.count("at work") == 2


@pytest.mark.parametrize(
    ("keeps", "words"),
    [
        (lambda line: True, "finished at step 6 of 6, loss "),
        (lambda line: "run_finished" not in line, "interrupted at step 6 of 6, loss "),
        (lambda line: False, "interrupted: before the first step of 6; continue with: "),
    ],
    ids=["finished", "killed", "before-its-first-step"],
)
def test_status_says_how_far_the_run_is(
    launched: Launched, trained: Trained, keeps: Callable[[str], bool], words: str
) -> None:
    launched("launch", "--nodes", "1")
    launched.wait_at_work(1)
    assert "starting: before the first step of 6\n" in launched("status").out
    launched("down")
    for path in (trained.root / "run/journal").rglob("*.jsonl"):
        copy = launched.folder / "journal" / path.relative_to(trained.root / "run/journal")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text("".join(filter(keeps, path.read_text().splitlines(keepends=True))))
    shown = within("status", launched.folder).out
    assert words in shown
    if "step 6" in words:
        assert "last checkpoint: step 6" in shown
    is_over = words.startswith("finished")
    assert f"node-0  {'finished' if is_over else 'left'}" in shown
    again = f"continue with: holdfast launch {launched.run_file} launch.nodes=1"
    assert (again in shown) != is_over
    told = json.loads(within("status", launched.folder, "--json").out)
    assert told["run"]["step"] == (6 if "step 6" in words else 0)
    assert told["nodes"][0]["state"] == "finished"


def test_the_job_of_a_run_in_a_bucket_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    address = "s3://runs/away?endpoint=http://127.0.0.1:1&allow_http=true"
    folder = make_local_folder(address)
    (folder / "node-0.log").write_text("at work\n")
    OwnedJob("local", "tiny", 1, {"folder": str(folder), "node-0": "1@0"}).write(folder)
    assert "node-0  lost" in within("status", address).out
    assert within("logs", address).out == "node-0: at work\n"
    assert within("down", address).code == 0
    again = within("down", "--no-wait", address)
    assert f"holdfast status '{address}'" in again.err


def test_a_launched_run_is_followed_by_its_folder(launched: Launched) -> None:
    """The run file may name another folder than the command line did."""
    folder = launched.folder = launched.folder.with_name("another name")
    done = launched("launch", "--nodes", "1", f"folder={folder}")
    assert f"  holdfast status {shlex.quote(str(folder))}\n" in done.err
    assert within("down", folder).code == 0


@pytest.mark.parametrize(
    ("words", "places"),
    [
        (["--on", "slurm", "launch.slurm.gpus_per_node=h100:8"], 8),
        (["--on", "slurm", "launch.slurm.gres='gpu:4,nvme:1'"], 4),
        (["--on", "slurm", "launch.slurm.gres=nvme:2"], 1),
        (["--on", "slurm", "launch.slurm.gpus_per_node=8", "cluster.places=2"], 2),
        (["--on", "ray", "launch.ray.gpus=4", "launch.ray.address=10.0.0.1:6379"], 4),
        (["launch.slurm.gpus_per_node=8"], 1),
        (["layout.workers=3"], 2),
        (["layout.workers=1"], 1),
    ],
)
def test_a_node_has_a_place_for_each_device_that_is_asked_for(
    launched: Launched, words: list[str], places: int
) -> None:
    text = launched.run_file.read_text()
    launched.run_file.write_text(text.replace("cluster: {places: 1}", ""))
    shown = launched("launch", "--nodes", "2", "--dry-run", *words)
    assert f"cluster.places={places}" in shown.out, shown.err


def test_another_number_of_nodes_while_the_job_runs(launched: Launched) -> None:
    launched("launch", "--nodes", "1", "launch.most_nodes=3")
    launched.wait_at_work(1)
    more = launched("launch", "--nodes", "3", "launch.most_nodes=3")
    assert "local brings job tiny from 1 to 3 nodes" in more.err
    assert "spares" not in more.err, "the run was planned for three nodes"
    launched.wait_at_work(3)
    fewer = launched("launch", "--nodes", "2")
    assert "local brings job tiny from 3 to 2 nodes" in fewer.err
    launched.wait(lambda: "leaves" in (launched.folder / "launch/node-2.log").read_text())
    assert launched.states == {"node-0": "running", "node-1": "running"}
    wider = launched("launch", "--nodes", "4")
    assert "further nodes are spares until" in wider.err


def test_a_refused_number_of_nodes_is_not_remembered(launched: Launched) -> None:
    launched("launch", "--nodes", "1", "launch.most_nodes=3")
    before = read_resolved(launched.folder)
    refused = launched("launch", "--nodes", "2", "cluster.metrics_port=9999")
    refused.refuses_last("cluster.metrics_port: all 2 nodes are on this machine")
    assert read_resolved(launched.folder) == before
    assert launched.states == {"node-0": "running"}


def test_a_node_that_failed_is_started_again(launched: Launched) -> None:
    launched.script = f'case $0 in node-1) echo "no GPU"; exit 2;; esac; {AT_WORK}'
    launched("launch", "--nodes", "2")
    launched.wait(lambda: launched.states["node-1"] == "failed")
    assert "exit code 2" in launched("status").out
    launched.wait_at_work(1)
    launched.script = AT_WORK
    again = launched("launch", "--nodes", "2")
    assert "local brings job tiny from 1 to 2 nodes" in again.err
    assert launched.states == {"node-0": "running", "node-1": "running"}
    launched.wait_at_work(2)


def test_logs_are_followed_until_no_node_is_at_work(launched: Launched) -> None:
    launched.script = "echo one; sleep 0.2; echo two; sleep 0.2; echo three"
    launched("launch", "--nodes", "2", "launch.spares=1")
    followed = launched("logs", "--follow").out.splitlines()
    for node in ("node-0", "node-1", "node-2"):
        words = [line.partition(": ")[2] for line in followed if line.startswith(node)]
        assert words == ["one", "two", "three"]
    assert launched("logs", "--node", "node-1").out.splitlines() == ["one", "two", "three"]


def test_a_dry_run_prints_the_commands_and_starts_nothing(launched: Launched) -> None:
    done = launched("launch", "--nodes", "2", "--dry-run", "cluster.gloo_interface=eth7")
    commands = [shlex.split(line) for line in done.out.splitlines()]
    assert [words[words.index("--node") + 1] for words in commands] == ["node-0", "node-1"]
    assert all("cluster.places=1" in words for words in commands)
    assert all("cluster.gloo_interface=eth7" in words for words in commands)
    assert not launched.folder.exists()


def test_a_finished_run_is_not_launched(trained: Trained, tmp_path: Path) -> None:
    done = within("launch", trained.run_file)
    assert done.code == 0
    assert "this run is finished" in done.err
    assert not (trained.folder / "launch.json").exists()


def test_a_run_that_another_trainer_has_is_not_launched(launched: Launched) -> None:
    """A second coordinator: the run of one node takes in no other, so nothing is submitted."""
    launched.script = "true"
    launched("launch")
    launched("down")
    store = FolderStore(launched.folder)
    assert create_term(store, 1, "127.0.0.1:1", "a", True, Host("host-a", "boot-a"))
    with growing(store):
        refused = launched("launch", "--nodes", "2")
    refused.refuses_last("trains this run without other nodes", "cluster.node=NAME")
    assert set(launched.states) == {"node-0"}, "the job of before"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.metrics_port=9500", ("cluster.metrics_port", "use 0")),
        ("cluster.interface=eth77", ("cluster.interface", "no address eth77", "127.0.0.1 (lo)")),
        ("cluster.gloo_interface=eth77", ("cluster.gloo_interface", "eth77", "one of", "lo")),
    ],
)
def test_what_nodes_here_cannot_listen_on_is_said_before_the_start(
    launched: Launched, override: str, words: tuple[str, ...]
) -> None:
    launched("launch", "--nodes", "2", override).refuses(*words)
    assert not (launched.folder / "launch.json").exists()


def test_of_launchers_of_a_run_in_a_bucket_one_starts_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path / "bucket")
    monkeypatch.setattr(launch_claim, "bucket_of_run", lambda folder: "s3://b/run")
    monkeypatch.setattr(launch_claim, "store_of_run", lambda folder: store)
    one, other = HolderWatch(tmp_path / "one"), HolderWatch(tmp_path / "other")
    launch_claim.claim_launch(one.folder, "local", one)
    launch_claim.claim_launch(one.folder, "local", one)  # its own is no hindrance
    launch_claim.release_claim(other.folder)
    with pytest.raises(RunFolderError, match="has launched this run"):
        launch_claim.claim_launch(other.folder, "local", other)
    launch_claim.release_claim(one.folder)
    launch_claim.claim_launch(other.folder, "local", other)
    monkeypatch.setattr(launch_claim, "START_TIME_S", 0.0)
    monkeypatch.setattr(one, "wait_for_verdict", lambda: False)
    launch_claim.claim_launch(one.folder, "local", one)


def test_a_run_that_was_never_launched(trained: Trained, tmp_path: Path) -> None:
    within("down", trained.folder).refuses("no launch of this run", "holdfast launch")
    for more in ((), ("--follow",)):  # the run's own logs
        assert "RunFinished(step=6" in within("logs", trained.folder, *more).succeeds().out
    for command in ("status", "logs", "down"):
        within(command, tmp_path).refuses("there is no run here")
    copied = shutil.copytree(trained.folder, tmp_path / "copied")
    for folder in (trained.folder, copied):  # nodes and progress are in the journal
        shown = within("status", folder)
        assert shown.code == 1
        assert "finished at step" in shown.out


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Golden: `launch.json` of this version stays readable."""
    (tmp_path / "launch.json").write_text(
        '{"owner": "slurm", "job": "17", "nodes": 4, "details": {"partition": "debug"}}'
    )
    job = OwnedJob("slurm", "17", 4, {"partition": "debug"})
    assert OwnedJob.read(tmp_path) == job
    job.write(tmp_path)
    assert OwnedJob.read(tmp_path) == job
