"""Slurm as an owner of machines: jobs whose batch step keeps an agent at work on each node.

One script serves every job of a run. The run is an array of jobs of one node, or of more
(`launch.slurm.nodes_per_job`). Spares, and nodes by which the run grows, are further arrays of jobs
of one node: Slurm cannot add nodes to a job. All jobs have one name, which finds them again.
`launch/owners/slurm/job.py` is the program of the batch step.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from holdfast.errors import ConfigError
from holdfast.launch.owners.owner import (
    LaunchRequest,
    NodeState,
    NodeStatus,
    OwnedJob,
    chosen_nodes,
)
from holdfast.launch.owners.slurm.commands import (
    JobLine,
    cancel,
    jobs_named,
    nodes_with_agents,
    refuse_impossible,
    release_nodes,
    request_leave,
    submit_job,
)
from holdfast.launch.owners.slurm.job import output_pattern
from holdfast.wire.child_command import module_command

FOLDER = "launch"
SCRIPT = "slurm.sh"
_PENDING = "--state=PENDING"  # jobs that have not started
_STATES = {
    "COMPLETED": NodeState.FINISHED,
    "CANCELLED": NodeState.FINISHED,
    "NODE_FAIL": NodeState.LOST,
    "PENDING": NodeState.WAITING,
    "REQUEUED": NodeState.WAITING,
    "SUSPENDED": NodeState.WAITING,
    "RUNNING": NodeState.RUNNING,
    "CONFIGURING": NodeState.RUNNING,
    "COMPLETING": NodeState.RUNNING,
    "RESIZING": NodeState.RUNNING,
    "SIGNALING": NodeState.RUNNING,
}
"""Slurm's word for a job -> state of its nodes; FAILED for every other word, such as TIMEOUT."""


@dataclass(frozen=True)
class _Submission:
    """Jobs of `nodes` nodes each; `count` of them are an array if there is more than one."""

    nodes: int
    count: int = 1

    def options(self) -> list[str]:
        array = [f"--array=0-{self.count - 1}"] if self.count > 1 else []
        return [f"--nodes={self.nodes}", *array]

    def arguments(self, script: Path) -> list[str]:
        return ["sbatch", "--parsable", *self.options(), str(script)]


class SlurmOwner:
    """Implements `MachineOwner`."""

    def describe(self, request: LaunchRequest) -> str:
        script = request.folder / FOLDER / SCRIPT
        commands = [shlex.join(each.arguments(script)) for each in _submissions(request)]
        return "".join(f"{line}\n" for line in commands) + f"\n{script}:\n{script_text(request)}"

    def check(self, request: LaunchRequest) -> None:
        slurm, script = request.config.launch.slurm, script_text(request)
        refuse_impossible(slurm, request.nodes, _submissions(request)[0].nodes)
        for each in _submissions(request):
            submit_job(["sbatch", "--test-only", *each.options()], slurm, script)

    def submit(self, request: LaunchRequest) -> OwnedJob:
        slurm, largest_job = request.config.launch.slurm, _submissions(request)[0].nodes
        refuse_impossible(slurm, request.nodes, largest_job)
        script = _write_script(request)
        name = job_name(request)
        numbers: list[str] = []
        try:
            for each in _submissions(request):
                numbers.append(submit_job(each.arguments(script), slurm))
        except BaseException:
            cancel(_PENDING, f"--name={name}")
            raise
        details = {"name": name, "folder": str(script.parent)}
        return OwnedJob("slurm", numbers[0], request.all_nodes, details)

    def resize(self, job: OwnedJob, request: LaunchRequest) -> OwnedJob:
        """Queue jobs of one node each, or give back what the run has too much of.

        Given back first are jobs that still wait, then jobs of one node, then nodes of larger ones.
        """
        jobs = [each for each in _jobs(job) if _state(each) in _LIVE]
        missing = request.all_nodes - sum(each.nodes for each in jobs)
        if missing > 0:
            slurm = request.config.launch.slurm
            refuse_impossible(slurm, request.nodes, 1)
            submit_job(_Submission(1, missing).arguments(_write_script(request)), slurm)
        elif missing < 0:
            _shrink(jobs, -missing)
        return OwnedJob("slurm", job.job, request.all_nodes, job.details)

    def status(self, job: OwnedJob) -> list[NodeStatus]:
        found: dict[str, NodeStatus] = {}
        jobs = _jobs(job)
        agents = nodes_with_agents() if any(_state(j) is NodeState.RUNNING for j in jobs) else set()
        for each in jobs:  # in the order of their starts: a later job of a node counts
            state = _state(each)
            if state is NodeState.WAITING:
                for number in range(each.nodes):
                    name = f"{each.job}.{number}"
                    found[name] = NodeStatus(name, state, f"Slurm: {each.reason}")
                continue
            for node in each.names:
                idle = state is NodeState.RUNNING and (each.job, node) not in agents
                detail = f"job {each.job}, {each.state.lower()}"
                found[node] = NodeStatus(node, state, f"{detail}, no agent" if idle else detail)
        return list(found.values())

    def logs(self, job: OwnedJob, node: str) -> Iterator[str]:
        """Node `slurm` is what the jobs themselves have printed. A node that waits has no lines."""
        folder = Path(job.details["folder"])
        known = sorted(path.stem for path in folder.glob("*.log"))
        for name in [] if _WAITING_NODE.fullmatch(node) else chosen_nodes(known, node):
            for line in (folder / f"{name}.log").read_text("utf-8", "replace").splitlines():
                yield line if node else f"{name}: {line}"

    def release(self, job: OwnedJob) -> None:
        """Have all agents leave; the second call ends them with Slurm's KillWait."""
        if job.released:
            cancel(f"--name={job.details['name']}")
            return
        cancel(_PENDING, f"--name={job.details['name']}")
        running = [each.job for each in _jobs(job) if _state(each) is NodeState.RUNNING]
        request_leave(running)


_LIVE = (NodeState.WAITING, NodeState.RUNNING)
_WAITING_NODE = re.compile(r"\d+(_\d+)?\.\d+")
"""What `status` calls a node of a job that has none yet, such as 8.0."""


def job_name(request: LaunchRequest) -> str:
    """Return the name of the run's jobs. The same name of another run gives another one."""
    return f"{request.name}-{xxh3_64_hexdigest(request.location.encode())[:8]}"


def script_text(request: LaunchRequest) -> str:
    """Return the script of every job of the run. `sbatch` gets the number of nodes."""
    slurm, folder = request.config.launch.slurm, request.folder / FOLDER
    given = {
        "job-name": job_name(request),
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time,
        "gpus-per-node": slurm.gpus_per_node,
        "gres": slurm.gres,
        "cpus-per-task": str(slurm.cpus or ""),
        "mem": slurm.memory,
        "constraint": slurm.constraint,
        "reservation": slurm.reservation,
        "signal": f"B:USR1@{slurm.notice_seconds}" if slurm.notice_seconds else "",
        "open-mode": "append",
        "output": output_pattern(folder / "slurm.log"),
    }
    options = [f"--{key}={value}" for key, value in given.items() if value]
    taken = {key for key, value in given.items() if value} | _SET_ALWAYS
    options += ["--no-kill", "--requeue" if slurm.requeue else "--no-requeue"]
    options += ["--exclusive"] if slurm.exclusive else []
    keeper = ["--script", str(folder / SCRIPT), "--logs", str(folder)]
    keeper += ["--replace"] if slurm.replace else []
    keeper += ["--requeue"] if slurm.requeue else []
    agent = request.join_arguments("{node}", "cluster.notices=slurm")
    command = module_command(
        "holdfast.launch.owners.slurm.job",
        *keeper,
        "--",
        *module_command("holdfast.cli.main", *agent),
    )
    lines = ["#!/bin/bash", *(_sbatch_line([option]) for option in options)]
    lines += [_sbatch_line(_split_option(option, taken)) for option in slurm.options]
    lines += [*slurm.setup, "export PYTHONUNBUFFERED=1"]
    if "://" in request.location:
        lines += [f"export HOLDFAST_SECRET_FILE={shlex.quote(str(request.secret_file))}"]
    return "\n".join([*lines, f"exec {shlex.join(command)}"]) + "\n"


_SET_ALWAYS = frozenset(
    {"nodes", "ntasks", "array", "requeue", "no-requeue", "no-kill", "wrap", "parsable"}
)
"""Options of sbatch that Holdfast sets, in addition to those of the run file's keys."""
_SHORT = {"N": "nodes", "n": "ntasks", "a": "array", "J": "job-name", "o": "output", "k": "no-kill"}
_SHORT |= {"p": "partition", "A": "account", "q": "qos", "t": "time", "C": "constraint"}
_SHORT |= {"c": "cpus-per-task"}


def _split_option(option: str, taken: AbstractSet[str]) -> list[str]:
    """Return the words of one of `launch.slurm.options`. A text with quotes is split as a shell
    does. Raises ConfigError for an option that another key sets."""
    head, space, rest = option.partition(" ")
    with suppress(ValueError):  # of a quote without an end
        words = [option] if "=" in head or not space else [head, rest.strip()]
        words = shlex.split(option) if re.search("[\"'\\\\]", option) else words
        name = words[0].partition("=")[0]
        name = name[2:] if name.startswith("--") else _SHORT.get(name[1:2], name)
        if name not in taken:
            return words
    raise ConfigError(
        f"{option} has a quote without an end, or sets what another key sets",
        where="launch.slurm.options",
        remedy="use launch.nodes, or the other keys of launch.slurm",
    )


def _sbatch_line(words: Sequence[str]) -> str:
    """Return a line of options. sbatch splits it at spaces that no quotes enclose, ends it at a #,
    reads backslashes also inside quotes, and removes the words packjob and hetjob."""
    if any(re.search(r"[\x00-\x1f\x7f]", word) for word in words):
        raise ConfigError(
            f"{words[0]!r} has a control character", where="launch.slurm", remedy="leave it out"
        )
    escaped = [re.sub(r"[\"\\]|(?i:[ae](?=ckjob|tjob))", r"\\\g<0>", word) for word in words]
    quoted = [each if re.fullmatch(r"[\w./=:,@%+~-]*", each) else f'"{each}"' for each in escaped]
    return " ".join(["#SBATCH", *quoted])


def _submissions(request: LaunchRequest) -> list[_Submission]:
    size = min(request.config.launch.slurm.nodes_per_job or request.nodes, request.nodes)
    count, rest = divmod(request.nodes, size)
    found = [_Submission(size, count)]
    found += [_Submission(rest)] if rest else []
    found += [_Submission(1, request.spares)] if request.spares else []
    return found


def _write_script(request: LaunchRequest) -> Path:
    script = request.folder / FOLDER / SCRIPT
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(script_text(request), "utf-8")
    return script


def _jobs(job: OwnedJob) -> list[JobLine]:
    """Return the jobs of this launch; earlier ones of the same run have smaller numbers."""
    return [each for each in jobs_named(job.details["name"]) if each.number >= int(job.job)]


def _state(job: JobLine) -> NodeState:
    return _STATES.get(job.state, NodeState.FAILED)


def _shrink(jobs: Sequence[JobLine], surplus: int) -> None:
    waiting = [each for each in jobs if _state(each) is NodeState.WAITING and each.nodes == 1]
    small = [each for each in jobs if _state(each) is NodeState.RUNNING and each.nodes == 1]
    taken = [*waiting, *reversed(small)][:surplus]
    for each in taken:
        if each in waiting:
            cancel(_PENDING, each.job)
    request_leave([each.job for each in taken if each in small])
    surplus -= len(taken)
    for each in (job for job in jobs if job.nodes > 1 and _state(job) is NodeState.RUNNING):
        nodes = each.names[1:][-surplus:] if surplus > 0 else ()  # the first one has the batch step
        release_nodes(each, nodes)
        surplus -= len(nodes)
