"""A server that keeps objects as a Kubernetes API server does, enough for a real kubectl.

It knows the kinds of a Job and its account. It makes a pod for each node of a Job that is applied.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Object = dict[str, Any]
GROUPS = {  # path of a group: its resources and their kinds
    "/api/v1": {
        "pods": "Pod",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "events": "Event",
        "namespaces": "Namespace",
        "nodes": "Node",
    },
    "/apis/batch/v1": {"jobs": "Job"},
    "/apis/rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
}
VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


@dataclass
class SmallKubernetes:
    """objects: by resource and name. refused: resources that the account may not change."""

    address: str = ""
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    log: str = "step 1\nstep 2\n"

    def names(self, resource: str) -> list[str]:
        return sorted(name for found, name in self.objects if found == resource)

    def put(self, resource: str, made: Object) -> Object:
        name = made["metadata"]["name"]
        made["metadata"] |= {"uid": f"uid-{name}", "resourceVersion": str(len(self.objects) + 1)}
        self.objects[resource, name] = made
        return made

    def start_pods(self, job: Object) -> None:
        labels = job["spec"]["template"]["metadata"]["labels"]
        containers = job["spec"]["template"]["spec"]["containers"]
        for index in range(job["spec"]["parallelism"]):
            name = f"{job['metadata']['name']}-{index}-abcde"
            pod: Object = {"apiVersion": "v1", "kind": "Pod", "status": {"phase": "Running"}}
            pod |= {"metadata": {"name": name, "namespace": "default", "labels": labels}}
            self.put(
                "pods", pod | {"spec": {"nodeName": f"machine-{index}", "containers": containers}}
            )


@contextmanager
def small_kubernetes() -> Iterator[SmallKubernetes]:
    kube = SmallKubernetes()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            path, query = self._path()
            if (found := _discovery(path)) is not None:
                self._answer(200, found)
                return
            resource, name, log = _target(path)
            if log:
                self._answer(200, kube.log)
            elif name:
                known = kube.objects.get((resource, name))
                self._answer(*((200, known) if known else _missing(resource, name)))
            else:
                self._answer(200, _listing(kube, resource, query))

        def do_PATCH(self) -> None:
            resource, name, _ = _target(self._path()[0])
            made = yaml.safe_load(self.rfile.read(int(self.headers["Content-Length"])))
            if resource in kube.refused:
                words = f'{resource} "{name}" is forbidden: User "u" cannot patch resource'
                self._answer(403, _status("Forbidden", words, 403))
                return
            self._answer(200, kube.put(resource, made))
            if resource == "jobs":
                kube.start_pods(made)

        def do_DELETE(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path, query = self._path()
            resource, name, _ = _target(path)
            items = _listing(kube, resource, query)["items"]
            names = [name] if name else [each["metadata"]["name"] for each in items]
            found = [kube.objects.pop((resource, each), None) for each in names]
            if resource == "jobs":
                for pod in kube.names("pods"):
                    kube.objects.pop(("pods", pod))
            done = _status("", "", 200) | {"status": "Success"}
            self._answer(*((200, done) if any(found) or not name else _missing(resource, name)))

        def _path(self) -> tuple[str, dict[str, list[str]]]:
            split = urlsplit(self.path)
            return split.path, parse_qs(split.query)

        def _answer(self, code: int, value: Any) -> None:
            is_text = isinstance(value, str)
            content = (value if is_text else json.dumps(value)).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if is_text else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kube.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield kube
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _discovery(path: str) -> Object | None:
    """What groups and kinds there are."""
    if path == "/version":
        return {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = []
        for group in list(GROUPS)[1:]:
            version = {"groupVersion": group.removeprefix("/apis/"), "version": "v1"}
            name = group.split("/")[2]
            groups.append({"name": name, "versions": [version], "preferredVersion": version})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/openapi/v3":
        places = {g[1:]: {"serverRelativeURL": f"/openapi/v3{g}?hash=1"} for g in GROUPS}
        return {"paths": places}
    if path.startswith("/openapi/v3"):
        return _fields_are_checked(path.removeprefix("/openapi/v3"))
    if path in GROUPS:
        resources = [
            {"name": name, "kind": kind, "verbs": VERBS, "singularName": kind.lower()}
            | {"namespaced": name not in ("namespaces", "nodes")}
            for name, kind in GROUPS[path].items()
        ]
        version = path.removeprefix("/apis/").removeprefix("/api/")
        return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
    return None


def _fields_are_checked(group: str) -> Object:
    """What kubectl looks for before it leaves the check of fields to the server."""
    name = group.split("/")[2] if group.startswith("/apis/") else ""
    parameter = {"name": "fieldValidation", "in": "query"}
    paths = {
        f"{group}/namespaces/{{namespace}}/{resource}/{{name}}": {
            "patch": {
                "parameters": [parameter],
                "responses": {},
                "x-kubernetes-group-version-kind": {"group": name, "kind": kind, "version": "v1"},
            }
        }
        for resource, kind in GROUPS[group].items()
    }
    return {"openapi": "3.0.0", "info": {"title": "small", "version": "1"}, "paths": paths}


def _target(path: str) -> tuple[str, str, bool]:
    """Resource, name and whether its log is asked for."""
    found = re.fullmatch(
        r"/(?:api|apis/[^/]+)/v1(?:/namespaces/[^/]+)?/(\w+)(?:/([^/]+))?(/log)?", path
    )
    return ("", "", False) if found is None else (found[1], found[2] or "", bool(found[3]))


def _listing(kube: SmallKubernetes, resource: str, query: dict[str, list[str]]) -> Object:
    (wanted,) = query.get("labelSelector", [""])
    key, _, value = wanted.partition("=")
    found = [
        each
        for (known, _), each in kube.objects.items()
        if known == resource
        and (not wanted or each["metadata"].get("labels", {}).get(key) == value)
    ]
    return {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": found}


def _missing(resource: str, name: str) -> tuple[int, Object]:
    return 404, _status("NotFound", f'{resource} "{name}" not found', 404)


def _status(reason: str, message: str, code: int) -> Object:
    found = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return found | {"reason": reason, "message": message, "code": code}
