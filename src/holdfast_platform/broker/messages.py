"""Requests to the broker, and its catalogue, in the words of the Open Service Broker API.

https://github.com/openservicebrokerapi/servicebroker/blob/v2.17/spec.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.json_parsing import parse_json

SERVICE = "holdfast-run"
PLANS = {
    "local": "nodes side by side on the broker's own machine, to try out a run",
    "ssh": "one node on each host of launch.ssh.hosts",
    "slurm": "nodes of a job of Slurm",
    "ray": "actors of a Ray cluster",
    "kubernetes": "pods of a Kubernetes cluster",
}
"""Owner of machines (`launch.on`) -> description of its plan."""
MOST_NODES = 10_000
MOST_LEVELS = 32
"""Levels of a request's body; a run file has fewer than ten."""
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_GIVEN = ("run", "overrides", "nodes")


class BrokerError(Exception):
    """An answer that is no success. error: the specification's own word for it, if it has one."""

    def __init__(self, status: int, description: str, error: str = "") -> None:
        super().__init__(description)
        self.status = status
        self.description = description
        self.error = error


@dataclass(frozen=True)
class Wanted:
    """What a platform wants of an instance or a binding. Two equal ones ask for the same."""

    service_id: str
    plan_id: str
    parameters: dict[str, Any]

    @property
    def owner(self) -> str:
        return self.plan_id.removeprefix(f"{SERVICE}-")


def checked_id(text: str) -> str:
    """Return an id of a platform, which names a folder here. Raises BrokerError."""
    if not _ID.fullmatch(text):
        raise BrokerError(
            400, "an id has at most 128 letters, digits, '-', '_' and '.', and begins with no '.'"
        )
    return text


def plan_of(service_id: object, plan_id: object) -> tuple[str, str]:
    """Return both ids if the catalogue has them. Raises BrokerError."""
    if service_id != SERVICE:
        raise BrokerError(400, f"service_id is not {SERVICE}")
    known = [f"{SERVICE}-{owner}" for owner in PLANS]
    if plan_id not in known:
        raise BrokerError(400, f"plan_id is none of {', '.join(known)}")
    return SERVICE, str(plan_id)


def wanted_instance(body: Mapping[str, Any]) -> Wanted:
    """Read the body of a provisioning. Raises BrokerError."""
    parameters = _parameters_of(body)
    if strange := sorted(set(parameters) - set(_GIVEN)):
        raise BrokerError(400, f"parameters has {strange[0]!r}; it may have {', '.join(_GIVEN)}")
    if not isinstance(parameters.get("run"), dict):
        raise BrokerError(400, "parameters.run is not an object with the keys of a run file")
    nodes = parameters.get("nodes", 1)
    if type(nodes) is not int or not 1 <= nodes <= MOST_NODES:
        raise BrokerError(400, f"parameters.nodes is not a whole number from 1 to {MOST_NODES}")
    overrides = parameters.get("overrides", [])
    if not isinstance(overrides, list) or not all(
        isinstance(one, str) and "=" in one for one in overrides
    ):
        raise BrokerError(400, "parameters.overrides is not a list of texts as 'train.steps=10'")
    return Wanted(*plan_of(body.get("service_id"), body.get("plan_id")), parameters)


def wanted_binding(body: Mapping[str, Any]) -> Wanted:
    """Read the body of a binding. Raises BrokerError."""
    parameters = _parameters_of(body)
    if parameters:
        raise BrokerError(400, "a binding takes no parameters")
    return Wanted(*plan_of(body.get("service_id"), body.get("plan_id")), parameters)


def _parameters_of(body: Mapping[str, Any]) -> dict[str, Any]:
    parameters = body.get("parameters", {})
    if not isinstance(parameters, dict):
        raise BrokerError(400, "parameters is not an object")
    return parameters


def read_body(text: bytes) -> dict[str, Any]:
    """Return the JSON object of a request. Raises BrokerError."""
    try:
        value = parse_json(text)
        json.dumps(
            value, ensure_ascii=False, allow_nan=False
        ).encode()  # no NaN, no half of a character
    except (ValueError, RecursionError):
        raise BrokerError(400, "the body is not JSON") from None
    if not isinstance(value, dict):
        raise BrokerError(400, "the body is not a JSON object")
    if not _is_shallow(value):
        raise BrokerError(400, f"the body has more than {MOST_LEVELS} levels")
    return value


def _is_shallow(value: object) -> bool:
    level = [value]
    for _ in range(MOST_LEVELS):
        inner: list[object] = []
        for one in level:
            inner += one.values() if isinstance(one, dict) else one if isinstance(one, list) else []
        if not inner:
            return True
        level = inner
    return False


def catalog() -> dict[str, Any]:
    """Return the body of GET /v2/catalog."""
    plans = [
        {
            "id": f"{SERVICE}-{owner}",
            "name": owner,
            "description": description,
            "free": True,
            "bindable": True,
            "schemas": {"service_instance": {"create": {"parameters": _schema()}}},
        }
        for owner, description in PLANS.items()
    ]
    service = {
        "id": SERVICE,
        "name": SERVICE,
        "description": "a training run of Holdfast",
        "bindable": True,
        "instances_retrievable": True,
        "bindings_retrievable": True,
        "plan_updateable": False,
        "plans": plans,
    }
    return {"services": [service]}


def _schema() -> dict[str, Any]:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "additionalProperties": False,
        "required": ["run"],
        "properties": {
            "run": {"type": "object", "description": "keys of a run file"},
            "overrides": {
                "type": "array",
                "items": {"type": "string", "pattern": "="},
                "description": "key=value, as after 'holdfast launch RUN.yaml'",
            },
            "nodes": {"type": "integer", "minimum": 1, "maximum": MOST_NODES, "default": 1},
        },
    }
