"""What the owner asks of Slurm's commands, and one sentence for what each refuses."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.config.sections.launch import SlurmConfig
from holdfast.errors import ConfigError, RunFolderError, UserError, use_one_of
from holdfast.launch.owners.slurm.job import STEP_NAME

COMMAND_TIMEOUT_S = 60.0
_JOB_FORMAT = "%i|%T|%r|%D|%N"


@dataclass(frozen=True)
class JobLine:
    """A job as `squeue` shows it. job: its number, with the index if it is of an array. names: of
    its nodes, once it has them."""

    job: str
    state: str
    reason: str
    nodes: int
    names: tuple[str, ...]

    @property
    def number(self) -> int:
        return int(self.job.partition("_")[0])


def run_slurm(*command: str, given: str = "", environ: Mapping[str, str] | None = None) -> str:
    """Return what a command of Slurm prints. Raises UserError if it is missing or fails.

    given: its standard input. environ: its environment, if it is not that of this process.
    """
    try:
        done = subprocess.run(
            command,
            input=given.encode(),
            capture_output=True,
            env=environ,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(
            f"Slurm's command {command[0]} is not on PATH of this machine",
            where="launch.on",
            remedy="run it on a login node of the cluster, or use --on local",
        ) from None
    except subprocess.TimeoutExpired:
        raise _unanswered(f"{command[0]} has not answered for {COMMAND_TIMEOUT_S:.0f} s") from None
    said = done.stderr.decode("utf-8", "replace")
    if done.returncode != 0:
        if re.search(r"Unable to contact|Connection|configuration source|Socket timed", said):
            raise _unanswered(_last_error(said))
        raise RefusedError(_last_error(said))
    return done.stdout.decode("utf-8", "replace")


class RefusedError(UserError):
    """Slurm has refused a command; the message is its own."""


def _unanswered(why: str) -> UserError:
    return RunFolderError(
        f"Slurm's controller does not answer ({why})",
        where="--on slurm",
        remedy="jobs that run continue; see with 'sinfo' whether it works, and try again",
    )


def _last_error(said: str) -> str:
    lines = [line for line in said.strip().splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Try ")] or ["without a word"]
    refusals = [line for line in lines if "error:" in line] or lines
    return refusals[-1].rpartition("error: ")[2].removeprefix("Batch job submission failed: ")


_KEYS = (
    ("option", "options"),
    ("account", "account"),
    ("partition", "partition"),
    ("qos", "qos"),
    ("time", "time"),
    ("gres", "gres"),
    ("generic resource", "gres"),
    ("cpu", "cpus"),
    ("memory", "memory"),
    ("feature", "constraint"),
    ("reservation", "reservation"),
)
"""A word of a refusal -> the key of `launch.slurm` that it is about."""


_VARIABLES = {"time": ("TIMELIMIT",), "mem": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU")}
"""Options whose variables of sbatch have other names -> those names, without SBATCH_."""
_OWN_VARIABLES = frozenset({"ARRAY_INX", "NO_KILL", "NO_REQUEUE", "REQUEUE", "WAIT"})


def without_overriding(environ: Mapping[str, str], script: str) -> dict[str, str]:
    """Return the environment without the variables that sbatch would put before an option of the
    script, or an option that Holdfast gives."""
    options = re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)
    taken = [_VARIABLES.get(each, (each.upper().replace("-", "_"),)) for each in options]
    names = {f"SBATCH_{name}" for each in (*taken, _OWN_VARIABLES) for name in each}
    return {name: value for name, value in environ.items() if name not in names}


def submit_job(command: Sequence[str], slurm: SlurmConfig, script: str = "") -> str:
    """Return the number of the job, or of the array. Raises ConfigError if Slurm refuses it.

    script: of a job that Slurm only looks at (`sbatch --test-only`)."""
    try:
        text = script or Path(command[-1]).read_text("utf-8")
        environ = without_overriding(os.environ, text)
        return run_slurm(*command, given=script, environ=environ).strip().partition(";")[0]
    except RefusedError as error:
        said = error.message.lower()
        key = next((key for word, key in _KEYS if word in said), "")
        raise ConfigError(
            f"Slurm refuses the job: {error.message}",
            where=f"launch.slurm.{key}" if key else "launch.slurm",
            remedy=_remedy(key, slurm),
        ) from None


def _remedy(key: str, slurm: SlurmConfig) -> str:
    if key == "partition":
        known = sorted(set(run_slurm("sinfo", "-h", "-o", "%R").split()))
        return use_one_of(known)
    if key == "gres" and slurm.gpus_per_node:
        return f"the nodes' own resources: {_per_node('%G')}; set launch.slurm.gpus_per_node"
    if key == "gres":
        return f"the nodes' own resources: {_per_node('%G')}"
    if key == "constraint":
        return f"the nodes' own features: {_per_node('%f')}"
    if key in ("account", "qos"):
        return "see what you may use with: sacctmgr show assoc user=$USER format=account,qos"
    if key == "reservation":
        return "see what there is with: scontrol show reservation"
    return "see what the cluster allows with: sinfo; scontrol show partition"


def _per_node(field: str) -> str:
    known = sorted(set(run_slurm("sinfo", "-h", "-o", field).split()))
    return ", ".join(known) or "none"


def refuse_impossible(slurm: SlurmConfig, nodes: int, largest_job: int) -> None:
    """Raises ConfigError for jobs that Slurm would accept and never start.

    nodes: of all jobs. largest_job: nodes of the largest one, which runs in one partition.
    """
    chosen = [f"--partition={slurm.partition}"] if slurm.partition else []
    most, largest, longest = 0, 0, 0.0
    for line in run_slurm("sinfo", "-h", *chosen, "-o", "%P|%D|%l").splitlines():
        name, count, limit = line.split("|")
        if slurm.partition or name.endswith("*"):
            most += int(count)
            largest = max(largest, int(count))
            longest = max(longest, seconds_of(limit))
    partition = f"partition {slurm.partition}" if slurm.partition else "the default partition"
    if 0 < most < nodes:
        raise ConfigError(
            f"{nodes} nodes do not fit: {partition} has {most}",
            where="launch.nodes",
            remedy=f"ask for at most {most}, or set launch.slurm.partition",
        )
    if 0 < largest < largest_job:
        raise ConfigError(
            f"a job of {largest_job} nodes does not fit: the largest partition of "
            f"{slurm.partition} has {largest}",
            where="launch.slurm.nodes_per_job",
            remedy=f"use at most {largest}, or set launch.slurm.partition",
        )
    if slurm.time and 0 < longest < seconds_of(slurm.time):
        raise ConfigError(
            f"the time limit {slurm.time} is longer than the partition's, which is "
            f"{time_text(longest)}",
            where="launch.slurm.time",
            remedy=f"use at most {time_text(longest)}; the job is queued again after it",
        )


def seconds_of(text: str) -> float:
    """Return the seconds of a time in Slurm's forms, such as 2-00:00:00 or 90 (minutes).

    Infinite if Slurm sets no limit, 0 for a text of another form: Slurm judges it itself."""
    if text.strip().lower() in ("infinite", "unlimited"):
        return float("inf")
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if found is None:
        return 0.0
    days, first, second, third = (int(part or 0) for part in found.groups())
    if found[1] is not None:  # days-hours[:minutes[:seconds]]
        return days * 86400 + first * 3600 + second * 60 + third
    if found[4] is not None:
        return first * 3600 + second * 60 + third
    return first * 60 + second


def time_text(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (
        f"{days}-{hours:02}:{minutes:02}:{rest:02}" if days else f"{hours}:{minutes:02}:{rest:02}"
    )


def jobs_named(name: str) -> list[JobLine]:
    """Return this user's jobs of a name, in the order of their starts; also those that ended not
    long ago (Slurm's MinJobAge)."""
    said = run_slurm(
        "squeue", "-h", "-r", "--me", "-t", "all", "-S", "S", "-n", name, "-o", _JOB_FORMAT
    )
    return [_job_line(line) for line in said.splitlines() if line.count("|") == 4]


def _job_line(line: str) -> JobLine:
    job, state, reason, nodes, names = line.split("|")
    return JobLine(job, state, reason, int(nodes), _host_names(names))


def _host_names(names: str) -> tuple[str, ...]:
    if "[" not in names:
        return tuple(name for name in names.split(",") if name)
    return tuple(run_slurm("scontrol", "show", "hostnames", names).split())


def nodes_with_agents() -> set[tuple[str, str]]:
    """Return job and node of each step of this user that is an agent."""
    said = run_slurm("squeue", "-h", "-s", "--me", "-o", "%i|%j|%N")
    parts = [line.split("|") for line in said.splitlines()]
    return {(p[0].rpartition(".")[0], p[2]) for p in parts if len(p) == 3 and p[1] == STEP_NAME}


def cancel(*chosen: str) -> None:
    """Cancel jobs of this user. chosen: numbers, or options of `scancel`."""
    run_slurm("scancel", "--quiet", "--me", *chosen)


def request_leave(jobs: Sequence[str]) -> None:
    """Have all agents of jobs save and leave; the jobs end with them."""
    if jobs:
        run_slurm("scancel", "--quiet", "--batch", "--signal=USR2", *jobs)


def release_nodes(job: JobLine, nodes: Sequence[str]) -> None:
    """Have the agents of some nodes leave; the job's program hands the nodes back then."""
    said = run_slurm("squeue", "-h", "-s", "-j", job.job, "-o", "%i|%j|%N")
    parts = [line.split("|") for line in said.splitlines()]
    steps = [p[0] for p in parts if len(p) == 3 and p[1] == STEP_NAME and p[2] in nodes]
    if steps:
        with suppress(RefusedError):  # 22.05 says so of each step, and delivers the signal
            run_slurm("scancel", "--quiet", "--signal=TERM", *steps)
