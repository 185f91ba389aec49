"""One service instance: a launched run, as its folder keeps it in `instance.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import RunFolderError
from holdfast.wire.store.publish import replace_file
from holdfast_platform.broker.messages import Wanted

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
