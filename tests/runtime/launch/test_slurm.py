"""What is submitted to Slurm, and what is made of its answers. Slurm's commands are scripts that
print what the real ones printed; `test_slurm_faults.py` uses the real ones."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.config.run import RunConfig
from holdfast.config.sections.launch import LaunchConfig, SlurmConfig
from holdfast.errors import ConfigError, RunFolderError
from holdfast.launch.owners.owner import LaunchRequest, NodeState, NodeStatus, OwnedJob
from holdfast.launch.owners.slurm.commands import refuse_impossible, seconds_of, without_overriding
from holdfast.launch.owners.slurm.owner import SlurmOwner, script_text
from tests.support.commands import within, write_run_file
from tests.support.fake_slurm import FakeSlurm

GOLDEN = Path(__file__).with_name("golden_slurm.txt")
DETAILS = {"name": "tiny-1", "folder": "/shared/runs/tiny/launch"}
JOB = OwnedJob("slurm", "7", 4, DETAILS)


def request_of(folder: str | Path = "/shared/runs/tiny", **given: object) -> LaunchRequest:
    slurm = SlurmConfig(**given)  # type: ignore[arg-type]
    config = RunConfig(name="tiny", launch=LaunchConfig(slurm=slurm))
    place = Path(folder)
    overrides = ("cluster.places=8",)
    return LaunchRequest("tiny", str(place), place, place / "secret", config, 4, 0, overrides)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    found = FakeSlurm(tmp_path / "bin")
    found.say("sinfo", "main*|4|1:00:00")
    monkeypatch.setenv("PATH", str(found.folder), prepend=":")
    return found


def test_the_text_that_is_submitted() -> None:
    given = {
        "partition": "gpu",
        "account": "lab",
        "qos": "high",
        "time": "2-00:00:00",
        "gpus_per_node": "h100:8",
        "constraint": "nvlink",
        "reservation": "week",
        "options": ("--switches=1@10:00", "--mail-type=END"),
        "setup": ("module load cuda",),
    }
    text = SlurmOwner().describe(replace(request_of(**given), spares=2))
    assert text.replace(sys.executable, "PYTHON") == GOLDEN.read_text()


def words_of(line: str) -> list[str]:
    """The options of a #SBATCH line as sbatch reads them (its manual, and Slurm 22.05)."""
    line = re.sub("hetjob|packjob", "", line.removeprefix("#SBATCH "), flags=re.IGNORECASE)
    words, quote, escaped = [""], "", False
    for sign in line:
        if escaped or (quote and sign not in (quote, "\\")):
            words[-1] += sign
            escaped = False
        elif sign == "\\":
            escaped = True
        elif quote or sign in "\"'":
            quote = "" if quote else sign
        elif sign == "#":
            break
        else:
            words += [""] if sign == " " else []
            words[-1] += sign.strip()
    return words


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--comment=a b # c", ["--comment=a b # c"]),
        ("--comment it's 5 \\\\ 6", None),
        ("--comment 'second one'", ["--comment", "second one"]),
        ("-w n1,n2", ["-w", "n1,n2"]),
        ('--comment=a \\"hetjob\\" -x', ["--comment=a", '"hetjob"', "-x"]),
        ("--job-name=other", None),
        ("-N 3", None),
        ("--time=5", None),
    ],
)
def test_values_of_a_script_reach_sbatch_as_they_are(option: str, words: list[str] | None) -> None:
    request = request_of("/runs/my run #1 100%j hetjob", time="5", options=(option,))
    if words is None:
        with pytest.raises(ConfigError, match=r"launch\.slurm\.options: .*sets what another"):
            SlurmOwner().describe(request)
        with pytest.raises(ConfigError, match=r"launch\.slurm: .*control character"):
            SlurmOwner().describe(request_of(partition="gpu\n"))
        return
    lines = [
        words_of(line) for line in script_text(request).splitlines() if line.startswith("#SBATCH")
    ]
    assert ["--output=/runs/my run #1 100%%j hetjob/launch/slurm.log"] in lines
    assert words in lines


def test_a_bucket_brings_the_secret_by_a_file() -> None:
    text = SlurmOwner().describe(replace(request_of(), location="s3://lab/runs/tiny"))
    assert "export HOLDFAST_SECRET_FILE=/shared/runs/tiny/secret\n" in text
    assert "join s3://lab/runs/tiny --node '{node}'" in text


def test_a_variable_of_sbatch_counts_only_where_the_run_file_is_silent() -> None:
    script = "#!/bin/bash\n#SBATCH --time=4:00:00\n#SBATCH --partition=a\n#SBATCH --mem=1G\n"
    names = ("TIMELIMIT", "PARTITION", "MEM_PER_CPU", "ARRAY_INX", "ACCOUNT")
    environ = {"PATH": "/bin"} | {f"SBATCH_{name}": "x" for name in names}
    assert without_overriding(environ, script) == {"PATH": "/bin", "SBATCH_ACCOUNT": "x"}


def test_jobs_of_one_node_are_an_array() -> None:
    first, second, _ = SlurmOwner().describe(request_of(nodes_per_job=3)).split("\n", 2)
    script = "/shared/runs/tiny/launch/slurm.sh"
    assert first == f"sbatch --parsable --nodes=3 {script}"
    assert second == f"sbatch --parsable --nodes=1 {script}"
    array = SlurmOwner().describe(request_of(nodes_per_job=1)).partition("\n")[0]
    assert array == f"sbatch --parsable --nodes=1 --array=0-3 {script}"


def test_submit_writes_the_script_and_returns_the_first_job(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.say("sbatch", "12;cluster")
    job = SlurmOwner().submit(replace(request_of(tmp_path / "run"), spares=1))
    script = tmp_path / "run" / "launch" / "slurm.sh"
    assert (job.job, job.nodes) == ("12", 5)
    assert slurm.calls("sbatch") == [
        f"--parsable --nodes=1 --array=0-3 {script}",
        f"--parsable --nodes=1 {script}",
    ]
    assert script.read_text().startswith("#!/bin/bash\n#SBATCH --job-name=tiny-")


def test_the_state_of_nodes_is_that_of_their_newest_job(slurm: FakeSlurm) -> None:
    slurm.say(
        "squeue",
        "3|COMPLETED|None|4|n[1-4]",  # an earlier launch
        "7|RUNNING|None|3|n[1-3]",
        "8|PENDING|Resources|1|",
        "9_0|COMPLETED|None|1|n5",
        "9_1|TIMEOUT|TimeLimit|1|n6",
        "10|NODE_FAIL|NodeDown|1|n7",
    )
    slurm.say("steps", "7.0|agent|n1", "7.1|agent|n3", "7.batch|batch|n1")
    assert SlurmOwner().status(JOB) == [
        NodeStatus("n1", NodeState.RUNNING, "job 7, running"),
        NodeStatus("n2", NodeState.RUNNING, "job 7, running, no agent"),
        NodeStatus("n3", NodeState.RUNNING, "job 7, running"),
        NodeStatus("8.0", NodeState.WAITING, "Slurm: Resources"),
        NodeStatus("n5", NodeState.FINISHED, "job 9_0, completed"),
        NodeStatus("n6", NodeState.FAILED, "job 9_1, timeout"),
        NodeStatus("n7", NodeState.LOST, "job 10, node_fail"),
    ]


def test_a_run_grows_by_jobs_of_one_node(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.say("squeue", "7|RUNNING|None|2|n1,n2", "8|PENDING|Resources|1|")
    request = replace(request_of(tmp_path / "run"), nodes=4, spares=1)
    assert SlurmOwner().resize(JOB, request).nodes == 5
    (call,) = slurm.calls("sbatch")
    assert call.startswith("--parsable --nodes=1 --array=0-1 ")


def test_a_run_shrinks_by_what_waits_then_small_jobs_then_nodes_of_large_ones(
    slurm: FakeSlurm,
) -> None:
    slurm.say(
        "squeue", "7|RUNNING|None|3|n1,n2,n3", "8_0|RUNNING|None|1|n4", "9|PENDING|Resources|1|"
    )
    SlurmOwner().resize(JOB, replace(request_of(), nodes=1))
    assert slurm.calls("scancel") == [
        "--quiet --me --state=PENDING 9",
        "--quiet --batch --signal=USR2 8_0",
        "--quiet --signal=TERM 7.1 7.2",
    ]


def test_down_cancels_what_waits_and_has_agents_leave(slurm: FakeSlurm) -> None:
    slurm.say("squeue", "7|RUNNING|None|3|n1,n2,n3", "8|PENDING|Resources|1|")
    SlurmOwner().release(JOB)
    assert slurm.calls("scancel") == [
        "--quiet --me --state=PENDING --name=tiny-1",
        "--quiet --batch --signal=USR2 7",
    ]
    SlurmOwner().release(replace(JOB, released=True))
    assert slurm.calls("scancel")[-1] == "--quiet --me --name=tiny-1"


def test_logs_are_of_one_node_or_of_all(tmp_path: Path) -> None:
    job = replace(JOB, details=DETAILS | {"folder": str(tmp_path)})
    (tmp_path / "n1.log").write_text("one\ntwo\n")
    (tmp_path / "slurm.log").write_text("job\n")
    assert list(SlurmOwner().logs(job, "n1")) == ["one", "two"]
    assert list(SlurmOwner().logs(job, "")) == ["n1: one", "n1: two", "slurm: job"]
    assert list(SlurmOwner().logs(job, "8.0")) == [], "it waits"
    with pytest.raises(RunFolderError, match="no node n9; use one of n1, slurm"):
        list(SlurmOwner().logs(job, "n9"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("1:00:00", 3600),
        ("2-00", 172800),
        ("1-02:03:04", 93784),
        ("infinite", float("inf")),
        ("soon", 0),
    ],
)
def test_times_in_the_forms_of_slurm(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


FAILED = "sbatch: error: Batch job submission failed: "
REFUSALS = {
    "partition": f"sbatch: error: invalid partition specified: x\n{FAILED}Invalid partition name",
    "account": f"{FAILED}Invalid account or account/partition combination specified",
    "qos": f"{FAILED}Invalid qos specification",
    "gres": "sbatch: error: Invalid generic resource (gres) specification",
    "constraint": f"{FAILED}Invalid feature specification",
    "reservation": f"{FAILED}Requested reservation is invalid",
    "time": f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)",
    "options": "sbatch: unrecognized option '--bogus'\nTry \"sbatch --help\" for more information",
}


@pytest.mark.parametrize(("key", "said"), REFUSALS.items())
def test_a_refusal_names_the_key(slurm: FakeSlurm, tmp_path: Path, key: str, said: str) -> None:
    slurm.refuse("sbatch", f"{said}\n")
    with pytest.raises(ConfigError) as error:
        SlurmOwner().submit(request_of(tmp_path / "run"))
    reason = said.split("\n")[key == "partition"].split("error: ")[-1].rpartition("failed: ")[2]
    assert str(error.value).startswith(f"launch.slurm.{key}: Slurm refuses the job: {reason}")
    assert "\n" not in str(error.value)


def test_more_nodes_or_time_than_the_partition_has(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Slurm itself accepts both, and never starts the job."""
    with pytest.raises(ConfigError, match="5 nodes do not fit: the default partition has 4"):
        SlurmOwner().submit(replace(request_of(tmp_path / "run"), nodes=5))
    with pytest.raises(ConfigError, match=r"time limit 2:00:00 is longer .* 1:00:00"):
        SlurmOwner().submit(request_of(tmp_path / "run", time="2:00:00"))
    assert not slurm.calls("sbatch")


def test_jobs_are_spread_over_several_partitions(slurm: FakeSlurm) -> None:
    """Each job runs in one of them."""
    slurm.say("sinfo", "a|4|1:00:00", "b|3|1:00:00")
    both = SlurmConfig(partition="a,b")
    refuse_impossible(both, 7, 1)
    with pytest.raises(ConfigError, match="8 nodes do not fit: partition a,b has 7"):
        refuse_impossible(both, 8, 1)
    with pytest.raises(ConfigError, match=r"nodes_per_job: a job of 5 nodes .* a,b has 4; use at"):
        refuse_impossible(both, 7, 5)


def test_a_machine_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="Slurm's command sinfo is not on PATH"):
        SlurmOwner().submit(request_of(tmp_path / "run"))


def test_a_controller_that_does_not_answer(slurm: FakeSlurm) -> None:
    slurm.refuse("squeue", "slurm_load_jobs error: Unable to contact slurm controller\n")
    with pytest.raises(RunFolderError, match="Slurm's controller does not answer"):
        SlurmOwner().status(JOB)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("time", "90 90:00 4:00:00 2-0 2-0:0 2-00:00:00 UNLIMITED", "4h 1:2:3:4 1- 2days"),
        ("memory", "0 4096 64G 64m", "64GB 64.5G much G"),
        ("gpus_per_node", "8 h100:8 a100_1g.5gb:2,h100:1", "eight h100: 8, :8"),
    ],
)
def test_a_value_has_a_form_of_sbatch(key: str, good: str, bad: str) -> None:
    for value in good.split():
        assert getattr(SlurmConfig.model_validate({key: value}), key) == value
    for value in bad.split():
        with pytest.raises(ValueError, match=key):
            SlurmConfig.model_validate({key: value})


@pytest.mark.parametrize("option", ["mail-type=END", "--comment=a\nb"])
def test_options_are_options(option: str) -> None:
    with pytest.raises(ValueError, match="no option of sbatch"):
        SlurmConfig(options=(option,))


def test_a_mistake_is_found_before_the_dataset_is_prepared(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    run_file = write_run_file(tmp_path)
    slurm.refuse("sbatch", "sbatch: error: invalid partition specified: nope\n")
    words = ("--on", "slurm", "--nodes", "2", "launch.slurm.partition=nope")
    done = within("launch", run_file, *words, f"folder={tmp_path}/run")
    done.refuses("launch.slurm.partition", "use one of")
    (call,) = slurm.calls("sbatch")
    assert call.startswith("--test-only --nodes=1 --array=0-1")
    assert not (tmp_path / "run").exists()
