"""All service instances of a broker, in folders of their ids.

A child process carries out an operation. It runs the real command: `holdfast launch` or `holdfast
down`. Both may be called again, so a new broker calls them again for what was not finished. The
child holds a lock of the instance's folder. If the broker is killed, the child continues, and the
next broker waits for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

import yaml

from holdfast.config.loading.load import load_config
from holdfast.core.json_parsing import parse_json
from holdfast.errors import RunFolderError, UserError
from holdfast.launch.owners.owner import JOB_FILE
from holdfast.launch.run.runs import run_folder_of
from holdfast.wire.child_command import module_command
from holdfast.wire.secret import given_secret_file
from holdfast.wire.store.publish import replace_file
from holdfast.wire.store.run_location import location_of_run
from holdfast_platform.broker.messages import BrokerError, Wanted, checked_id

INSTANCE_FILE = "instance.json"
RUN_FILE = "run.yaml"


class State(StrEnum):
    PROVISIONING = "provisioning"
    PROVISIONED = "provisioned"
    FAILED = "failed"  # its provisioning
    DEPROVISIONING = "deprovisioning"
    KEPT = "kept"  # its deprovisioning has failed
    DELETED = "deleted"  # the run's files stay


@dataclass(frozen=True)
class Instance:
    """run_folder: of the run on the broker's machine. operation: name of the newest one.
    description: why that has failed. bindings: by their ids."""

    id: str
    wanted: Wanted
    run_folder: str
    state: State
    operation: str
    description: str = ""
    bindings: dict[str, Wanted] = field(default_factory=dict)

    @property
    def is_changing(self) -> bool:
        return self.state in (State.PROVISIONING, State.DEPROVISIONING)

    def write(self, folder: Path) -> None:
        replace_file(folder / INSTANCE_FILE, json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def read(folder: Path) -> Instance | None:
        """Return the instance of this folder; None if there is none. Raises RunFolderError."""
        path = folder / INSTANCE_FILE
        try:
            value: dict[str, Any] = parse_json(path.read_text("utf-8"))
            bindings = {name: Wanted(**one) for name, one in value.pop("bindings").items()}
            wanted, state = Wanted(**value.pop("wanted")), State(value.pop("state"))
            return Instance(wanted=wanted, state=state, bindings=bindings, **value)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RunFolderError(
                "this is not what 'holdfast broker' wrote",
                where=str(path),
                remedy="move its folder away, and end the run's job with 'holdfast down'",
            ) from None

    def last_operation(self) -> dict[str, str]:
        """Return the body of GET .../last_operation."""
        if self.is_changing:
            return {"state": "in progress", "description": f"the run is {self.state.value}"}
        if self.state in (State.FAILED, State.KEPT):
            return {"state": "failed", "description": self.description}
        return {"state": "succeeded", "description": "the owner of the machines has the job"}

    def arguments(self, folder: Path) -> list[str]:
        """Return the arguments of `holdfast` that carry out the newest operation."""
        if self.state is State.DEPROVISIONING:
            return ["down", self.run_folder]
        nodes = str(self.wanted.parameters.get("nodes", 1))
        settings = ["--on", self.wanted.owner, "--nodes", nodes, "--json"]
        overrides = self.wanted.parameters.get("overrides", [])
        return ["launch", *settings, "--", str(folder / RUN_FILE), *overrides]


MOST_COMMANDS = 4
"""Children at work at once; each loads torch."""
MOST_DESCRIPTION = 1000
LOCK_FILE = ".lock"


class Instances:
    """Changes are made one at a time. folder: one broker has it at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder.absolute()
        self._lock = threading.Lock()
        self._children = threading.BoundedSemaphore(MOST_COMMANDS)
        # The lock of the broker's folder, which is held until this process ends.
        lock = (self._folder / LOCK_FILE).open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UserError(
                "another broker has this folder",
                where=str(self._folder),
                remedy="end that broker, or name another folder with --runs",
            ) from None
        self._own = lock

    def resume(self) -> None:
        """Begin again what an earlier broker did not finish."""
        for instance in self._all():
            if instance.is_changing:
                self._begin(instance)

    def find(self, name: str) -> Instance | None:
        return Instance.read(self._folder_of(name))

    def get(self, name: str) -> Instance:
        """Raises BrokerError for an instance that was never there (404) or was deleted (410)."""
        instance = self.find(name)
        if instance is None:
            raise BrokerError(404, f"there is no instance {name}")
        if instance.state is State.DELETED:
            raise BrokerError(410, f"instance {name} was deleted")
        return instance

    def provision(self, name: str, wanted: Wanted) -> Instance:
        """Begin to launch a run, or return the instance that is alike. Raises BrokerError."""
        with self._lock:
            folder, known = self._folder_of(name), self.find(name)
            if known is not None and known.state is not State.DELETED:
                if known.wanted != wanted or known.state in (State.DEPROVISIONING, State.KEPT):
                    raise BrokerError(409, f"instance {name} exists with another plan or run")
                if known.state is not State.FAILED:
                    return known
            run_folder = self._write_run(name, folder, wanted)
            return self._begin_anew(
                Instance(name, wanted, run_folder, State.PROVISIONING, "provision")
            )

    def deprovision(self, name: str, plan_id: str) -> Instance:
        """Begin to end the run's job. Raises BrokerError."""
        with self._lock:
            known = self._of_plan(name, plan_id)
            if known.state is State.DEPROVISIONING:
                return known
            _refuse_change(known)
            return self._begin_anew(
                replace(known, state=State.DEPROVISIONING, operation="deprovision", description="")
            )

    def bind(self, name: str, binding: str, wanted: Wanted) -> tuple[dict[str, Any], bool]:
        """Return the credentials, and whether the binding is new. Raises BrokerError."""
        with self._lock:
            known = self._of_plan(name, wanted.plan_id)
            if known.state is not State.PROVISIONED:
                raise BrokerError(422, f"instance {name} is not ready", "ConcurrencyError")
            before = known.bindings.get(checked_id(binding))
            if before is not None and before != wanted:
                raise BrokerError(409, f"binding {binding} exists with other attributes")
            if before is None:
                bound = replace(known, bindings=known.bindings | {binding: wanted})
                bound.write(self._folder_of(name))
            return {"credentials": _credentials(known)}, before is None

    def binding(self, name: str, binding: str) -> dict[str, Any]:
        """Return an existing binding. Raises BrokerError."""
        known = self.get(name)
        if binding not in known.bindings:
            raise BrokerError(404, f"there is no binding {binding}")
        return {"credentials": _credentials(known)}

    def unbind(self, name: str, binding: str, plan_id: str) -> None:
        """Raises BrokerError if there is no such binding (410)."""
        with self._lock:
            known = self._of_plan(name, plan_id)
            _refuse_change(known)
            if binding not in known.bindings:
                raise BrokerError(410, f"there is no binding {binding}")
            left = {each: one for each, one in known.bindings.items() if each != binding}
            replace(known, bindings=left).write(self._folder_of(name))

    def _of_plan(self, name: str, plan_id: str) -> Instance:
        known = self.get(name)
        if plan_id != known.wanted.plan_id:
            raise BrokerError(400, f"instance {name} has another plan")
        return known

    def _folder_of(self, name: str) -> Path:
        return self._folder / checked_id(name)

    def _all(self) -> Iterator[Instance]:
        for path in sorted(self._folder.glob(f"*/{INSTANCE_FILE}")):
            if (instance := Instance.read(path.parent)) is not None:
                yield instance

    def _write_run(self, name: str, folder: Path, wanted: Wanted) -> str:
        """Write the run file, and return the run's folder. Raises BrokerError if the run file is
        wrong, or another instance has that folder."""
        folder.mkdir(mode=0o700, exist_ok=True)
        run_file, given = folder / RUN_FILE, wanted.parameters
        run_file.write_text(yaml.safe_dump(given["run"], sort_keys=False), "utf-8")
        overrides = [*given.get("overrides", []), f"launch.on={wanted.owner}"]
        try:
            run_folder = str(run_folder_of(load_config(run_file, overrides).config).absolute())
            for other in self._all():
                if other.run_folder == run_folder and other.id != name:
                    raise BrokerError(400, f"instance {other.id} has the run folder {run_folder}")
        except (UserError, BrokerError) as error:
            run_file.unlink()
            with suppress(OSError):  # what an earlier instance of this id left
                folder.rmdir()
            raise BrokerError(400, str(error)) from None
        return run_folder

    def _begin_anew(self, instance: Instance) -> Instance:
        instance.write(self._folder_of(instance.id))
        self._begin(instance)
        return instance

    def _begin(self, instance: Instance) -> None:
        # A daemon: the broker may end before the child does.
        threading.Thread(target=self._carry_out, args=(instance,), daemon=True).start()

    def _carry_out(self, instance: Instance) -> None:
        is_launch, folder = instance.state is State.PROVISIONING, self._folder_of(instance.id)
        reason = ""
        try:
            with self._children, (folder / LOCK_FILE).open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if is_launch or (Path(instance.run_folder) / JOB_FILE).exists():
                    reason = _run_command(folder, instance.arguments(folder), lock)
        except OSError as error:
            reason = f"the broker cannot start a process in {folder} ({error.strerror})"
        if is_launch:
            state = State.FAILED if reason else State.PROVISIONED
        else:
            state = State.KEPT if reason else State.DELETED
        bindings = {} if state is State.DELETED else instance.bindings
        with self._lock:
            replace(instance, state=state, description=reason, bindings=bindings).write(folder)


def _refuse_change(instance: Instance) -> None:
    if instance.is_changing:
        raise BrokerError(
            422, f"instance {instance.id} is {instance.state.value}", "ConcurrencyError"
        )


def _run_command(folder: Path, arguments: list[str], lock: TextIO) -> str:
    """Run `holdfast` in a child; return why it failed in one sentence, "" if it did not. The child
    holds the lock as long as it runs."""
    output = folder / "stderr"
    with (folder / "stdout").open("wb") as out, output.open("wb") as err:
        code = subprocess.Popen(
            module_command("holdfast.cli.main", *arguments),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=[lock.fileno()],
            start_new_session=True,  # Ctrl-C ends the broker alone
        ).wait()
    if code == 0:
        return ""
    lines = output.read_text("utf-8", "replace").strip().split("\n")
    sentence = lines[-1].removeprefix("holdfast: ") or f"the command ended with exit code {code}"
    return sentence[:MOST_DESCRIPTION]


def _credentials(instance: Instance) -> dict[str, Any]:
    """Return how a run is reached. The secret's file is named; the secret itself is not sent."""
    folder = instance.run_folder
    secret = given_secret_file(os.environ) or Path(folder) / "secret"
    return {
        "store": location_of_run(folder),
        "run_folder": folder,
        "secret_file": str(secret),
        "commands": {
            name: ["holdfast", name, folder] for name in ("status", "logs", "watch", "report")
        },
    }
