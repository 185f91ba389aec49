"""Checks objects of Kubernetes against the definitions of their kinds, as an API server would.

Unknown fields, types, enumerations and patterns are checked. CEL rules and what webhooks check is
not. The definitions lie in `tests/golden/kubernetes/definitions.json.gz`. This makes them again:

    python -m tests.support.kubernetes_definitions CRDS CORE

CRDS: a folder with the CustomResourceDefinitions as JSON, one a file, without descriptions.
CORE: `kubernetes-json-schema/v1.37.0-local-strict` of the package kubernetes-validate 1.37.0.
"""

from __future__ import annotations

import gzip
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from tests.support.ranks import ROOT

DEFINITIONS = ROOT / "tests/golden/kubernetes/definitions.json.gz"
Schema = dict[str, Any]

CUSTOM = {  # file below CRDS: version and kind as the manifests have them
    "jobset/jobsets.jobset.x-k8s.io.json": "jobset.x-k8s.io/v1alpha2 JobSet",
    "trainer/trainingruntimes.trainer.kubeflow.org.json": (
        "trainer.kubeflow.org/v1alpha1 TrainingRuntime"
    ),
    "trainer/trainjobs.trainer.kubeflow.org.json": "trainer.kubeflow.org/v1alpha1 TrainJob",
    "kuberay/rayclusters.ray.io.json": "ray.io/v1 RayCluster",
    # The definition of Volcano's Job at hand is older than its topology. A JobTemplate has the same
    # spec, of 1.15.1.
    "volcano/jobtemplates.flow.volcano.sh.json": "batch.volcano.sh/v1alpha1 Job",
}
CORE = {
    "job-batch-v1": "batch/v1 Job",
    "secret-v1": "v1 Secret",
    "serviceaccount-v1": "v1 ServiceAccount",
    "role-rbac-v1": "rbac.authorization.k8s.io/v1 Role",
    "clusterrole-rbac-v1": "rbac.authorization.k8s.io/v1 ClusterRole",
    "rolebinding-rbac-v1": "rbac.authorization.k8s.io/v1 RoleBinding",
    "clusterrolebinding-rbac-v1": "rbac.authorization.k8s.io/v1 ClusterRoleBinding",
}


def problems(made: dict[str, Any]) -> list[str]:
    """Return what an API server would refuse in an object."""
    key = f"{made['apiVersion']} {made['kind']}"
    if key not in _definitions():
        return [f"no definition of {key} is at hand"]
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"
        for error in _validator(key).iter_errors(made)
    ]


@cache
def _definitions() -> Schema:
    found: Schema = json.loads(gzip.decompress(DEFINITIONS.read_bytes()))
    return found


@cache
def _validator(key: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(_definitions()[key])


# --- making them ----------------------------------------------------------------------------------
def _custom(path: Path, key: str) -> Schema:
    given = json.loads(path.read_text())
    version, kind = key.split(" ")
    is_own = given["spec"]["names"]["kind"] == kind
    found = next(
        each
        for each in given["spec"]["versions"]
        if not is_own or version == f"{given['spec']['group']}/{each['name']}"
    )
    schema: Schema = found["schema"]["openAPIV3Schema"]
    schema["properties"].pop("status", None)
    return strict(schema, is_root=True)


def strict(schema: Any, *, is_root: bool = False) -> Any:
    """Return a schema of Kubernetes as JSON Schema that refuses unknown fields."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {name: value for name, value in schema.items() if not name.startswith("x-kubernetes")}
    if "properties" in made:
        made["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
        if is_root:
            made["properties"]["metadata"] = {"type": "object"}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = strict(schema["additionalProperties"])
    if "items" in made:
        made["items"] = strict(schema["items"])
    if made.pop("nullable", False) and "type" in made:
        made["type"] = [made["type"], "null"]
    for name in ("format", "default"):
        made.pop(name, None)
    return made


def _core(folder: Path) -> dict[str, Schema]:
    """The kinds, with the definitions that they refer to in place: none contains itself."""
    known = json.loads((folder / "_definitions.json").read_text())["$defs"]

    def cleaned(value: Any) -> Any:
        if isinstance(value, list):
            return [cleaned(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return cleaned(known[value["$ref"].rpartition("/")[2]])
        return {
            name: cleaned(each)
            for name, each in value.items()
            if not (name == "description" and isinstance(each, str))
            and not name.startswith(("x-kubernetes", "$schema"))
        }

    return {
        key: cleaned(json.loads((folder / f"{name}.json").read_text()))
        for name, key in CORE.items()
    }


def main(crds: Path, core: Path) -> None:
    kinds = _core(core) | {key: _custom(crds / name, key) for name, key in CUSTOM.items()}
    text = json.dumps(kinds, separators=(",", ":"), sort_keys=True)
    DEFINITIONS.parent.mkdir(exist_ok=True)
    DEFINITIONS.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
