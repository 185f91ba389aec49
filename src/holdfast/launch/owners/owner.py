"""What `holdfast launch` asks of the owner of machines: a scheduler, a cluster or a host file.

An owner gets N nodes and starts the same command on each of them: `holdfast join`, which needs the
run store and the secret alone. The run was begun before (`cli/launch.py`): its dataset is prepared
and its description lies in the run store. So no node is special, and the owner may start them in
any order, again, or more of them later. An agent hears of notices itself (`elastic/notices`); the
owner names their source with `cluster.notices` among the arguments of `join`.

An owner keeps no state of its own. What it needs to find a job again is an `OwnedJob`, which lies
in the run folder as `launch.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from holdfast.core.json_parsing import JsonMessage, parse_json
from holdfast.errors import ConfigError, RunFolderError, use_one_of
from holdfast.wire.store.publish import replace_file

if TYPE_CHECKING:
    from holdfast.config.run import RunConfig

JOB_FILE = "launch.json"
USER_STOP = "the user stopped it with holdfast down"


class OwnerAwayError(ConfigError):
    """What knows the nodes of a job does not answer. The nodes may still be at work."""


@dataclass(frozen=True)
class LaunchRequest:
    """A run that is to be started on machines of an owner.

    name: of the run; an owner names its job after it.
    location: the run store as every node reaches it: an absolute path, or a bucket's address.
    folder: the run folder on this machine (a bucket's run has one, too).
    secret_file: absolute path of the run's secret on this machine. It is for owners that bring
        files to nodes. The secret itself is never an argument of a command.
    config: the run's configuration; `config.launch` has the owner's settings.
    nodes, spares: nodes of the run, and those that wait to replace a lost one.
    overrides: of every node's `join`, as KEY=VALUE.
    """

    name: str
    location: str
    folder: Path
    secret_file: Path
    config: RunConfig
    nodes: int
    spares: int = 0
    overrides: tuple[str, ...] = ()

    @property
    def all_nodes(self) -> int:
        return self.nodes + self.spares

    def join_arguments(self, node: str, *more: str) -> list[str]:
        """Return the arguments of `holdfast` with which a node of this name takes part. A name may
        be a variable that the owner's shell fills in."""
        return ["join", self.location, "--node", node, *self.overrides, *more]


@dataclass(frozen=True)
class OwnedJob:
    """What finds a started job again.

    owner: key of `config.launch.on`. job: the owner's own name of it, such as a job's number.
    details: what else this owner needs. Values are text, so that people can read the file.
    released: 'holdfast down' has given the nodes back; they may still be leaving.
    """

    owner: str
    job: str
    nodes: int
    details: dict[str, str] = field(default_factory=dict)
    released: bool = False

    def write(self, folder: Path) -> None:
        """Store it in the run folder, in place of an older one."""
        replace_file(folder / JOB_FILE, json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def read(folder: Path) -> OwnedJob:
        """Raises RunFolderError if no job of this run is known here."""
        path = folder / JOB_FILE
        try:
            value: Any = parse_json(path.read_text("utf-8"))
            details = {str(k): str(v) for k, v in dict(value["details"]).items()}
            owner, job, nodes = str(value["owner"]), str(value["job"]), int(value["nodes"])
            return OwnedJob(owner, job, nodes, details, bool(value.get("released", False)))
        except FileNotFoundError:
            raise RunFolderError(
                "no launch of this run is recorded here",
                where=str(folder),
                remedy="see a run that holdfast train started with: holdfast watch RUN_FILE, or "
                "start a job with: holdfast launch RUN_FILE --on OWNER",
            ) from None
        except (OSError, ValueError, KeyError, TypeError):
            raise RunFolderError(
                "this is not what 'holdfast launch' wrote",
                where=str(path),
                remedy="remove it, and end the job with its owner's own command",
            ) from None


def stop_cause_of(folder: Path) -> Callable[[], str]:
    """Return a function that says that 'holdfast down' has ended the run's job since this call; it
    returns "" otherwise."""

    def released_job() -> str:
        with suppress(RunFolderError):
            job = OwnedJob.read(folder)
            return job.job if job.released else ""
        return ""

    before = released_job()
    return lambda: USER_STOP if released_job() not in ("", before) else ""


ENDED = "ended without an exit code"
"""Detail of a lost node whose agent is known to have ended."""


class NodeState(StrEnum):
    WAITING = "waiting"  # the owner has not given the machine yet
    RUNNING = "running"
    FINISHED = "finished"  # its agent ended with exit code 0
    FAILED = "failed"
    LOST = "lost"  # the owner has lost the machine


@dataclass(frozen=True)
class NodeStatus(JsonMessage):
    """One node of a job as its owner sees it. detail: an exit code, or the owner's own word."""

    node: str
    state: NodeState
    detail: str = ""

    @property
    def is_live(self) -> bool:
        """Return True if the node is at work, or may be so later."""
        return self.state in (NodeState.WAITING, NodeState.RUNNING)


def chosen_nodes(known: Sequence[str], node: str) -> list[str]:
    """Return `node` alone, or all known nodes if it is empty. Raises RunFolderError for a node that
    is not known."""
    if not node:
        return list(known)
    if node in known:
        return [node]
    raise RunFolderError(
        f"this job has no node {node}",
        where="--node",
        remedy=use_one_of(known) if known else "leave out --node",
    )


class MachineOwner(Protocol):
    """One owner of machines. Every method may raise UserError, in one sentence, for what a person
    can mend: no quota, no such partition, an owner that does not answer."""

    def describe(self, request: LaunchRequest) -> str:
        """Return exactly what `submit` would submit, as text (`--dry-run`). Nothing is asked of the
        owner."""

    def submit(self, request: LaunchRequest) -> OwnedJob:
        """Ask for the nodes and return at once; the nodes start when the owner gives them."""

    def status(self, job: OwnedJob) -> list[NodeStatus]:
        """Return the nodes of the job that the owner knows of; none if it does not know the job."""

    def resize(self, job: OwnedJob, request: LaunchRequest) -> OwnedJob:
        """Bring a job that runs to the number of nodes of the request. It also starts again those
        that have ended, if the owner does not do so by itself."""

    def logs(self, job: OwnedJob, node: str) -> Iterator[str]:
        """Yield the lines that a node has printed so far; of all nodes, with their names, if `node`
        is empty."""

    def release(self, job: OwnedJob) -> None:
        """Give all nodes back. Agents get the owner's signal and leave the run after a step. A job
        that has ended is no error."""


@runtime_checkable
class CheckingOwner(Protocol):
    """An owner that can refuse a request at once, before a dataset is prepared for it."""

    def check(self, request: LaunchRequest) -> None:
        """Raise UserError for what `submit` would refuse, if a quick look shows it."""


@runtime_checkable
class WarningOwner(Protocol):
    """An owner that can tell where it gave other machines than it was asked for."""

    def warnings(self, job: OwnedJob) -> list[str]:
        """Return a sentence for each wish that was not granted. May raise UserError."""


OWNERS = {
    "local": ("local", "LocalOwner"),
    "ssh": ("ssh.owner", "SshOwner"),
    "slurm": ("slurm.owner", "SlurmOwner"),
    "ray": ("ray.owner", "RayOwner"),
    "kubernetes": ("kubernetes.owner", "KubernetesOwner"),
}
"""Word -> module of this folder, class. A module is imported when its owner is used."""


def open_owner(word: str) -> MachineOwner:
    """Raises ConfigError for a word that names no owner."""
    if word not in OWNERS:
        raise ConfigError(
            f"{word!r} owns no machines that are known", where="--on", remedy=use_one_of(OWNERS)
        )
    module, name = OWNERS[word]
    found: MachineOwner = getattr(import_module(f"holdfast.launch.owners.{module}"), name)()
    return found
