"""Calls of kubectl, and its complaints as one sentence each."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from typing import Any, Self

from holdfast.errors import UserError

REQUEST_TIMEOUT_S = 30
CALL_TIMEOUT_S = 90.0  # Seconds that one call of kubectl may take: kubectl asks several times
_LONGEST_WORDS = 300


class KubectlError(UserError):
    """kubectl has failed. words: what it said, shortened."""

    words: str = ""

    def saying(self, words: str) -> Self:
        self.words = words
        return self


class NotFoundError(KubectlError):
    """The cluster has no such object."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl in one namespace. context: "" for the current one."""

    context: str
    namespace: str
    program: str = "kubectl"

    def get(self, resource: str, *arguments: str) -> dict[str, Any]:
        """Return an object, or a list of objects. Raises NotFoundError and KubectlError."""
        found: dict[str, Any] = json.loads(self.run("get", resource, *arguments, "-o", "json"))
        return found

    def items(self, resource: str, *arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get(resource, *arguments)["items"]
        return found

    def apply(self, manifest: str) -> None:
        """Make objects, or change those that are there."""
        self.run(
            "apply",
            "--server-side",
            "--force-conflicts",
            "--field-manager=holdfast",
            "-f",
            "-",
            given=manifest,
        )

    def delete(self, *arguments: str) -> None:
        """Delete objects, and what belongs to them. Those that are not there are no error."""
        self.run("delete", "--ignore-not-found", "--cascade=foreground", *arguments)

    def run(self, *arguments: str, given: str | None = None) -> str:
        """Return what kubectl prints. given: its input.

        Raises KubectlError; NotFoundError if the cluster has no such object or namespace."""
        context = [f"--context={self.context}"] if self.context else []
        options = [f"--namespace={self.namespace}", f"--request-timeout={REQUEST_TIMEOUT_S}s"]
        command = [self.program, *context, *options, *arguments]
        try:
            done = subprocess.run(
                command, input=given or "", capture_output=True, text=True, timeout=CALL_TIMEOUT_S
            )
        except FileNotFoundError:
            raise KubectlError(
                "kubectl is not on PATH",
                where="launch.on kubernetes",
                remedy="install it: https://kubernetes.io/docs/tasks/tools",
            ) from None
        except subprocess.TimeoutExpired:
            raise self._unreachable(f"no answer within {CALL_TIMEOUT_S:.0f} s") from None
        if done.returncode:
            raise self._explained(done.stderr or done.stdout)
        return done.stdout

    def _explained(self, said: str) -> KubectlError:
        words = shorten(said)
        where = self.context or "the current context of kubectl"
        if re.search(
            r"Unable to connect|connection to the server|i/o timeout|connection refused", said
        ):
            return self._unreachable(words)
        if re.search(r"context was not found|^error: context .* does not exist", said):
            return KubectlError(
                f"kubectl knows no such context: {words}",
                where="launch.kubernetes.context",
                remedy="choose one that kubectl config get-contexts lists",
            ).saying(words)
        if found := re.search(
            r"no matches for kind \"?(\w+)|have a resource type \"?([\w.-]+)", said
        ):
            return KubectlError(
                f"the cluster does not know {found[1] or found[2]}: no controller of it is there",
                where="launch.kubernetes.kind",
                remedy="have it installed, or use launch.kubernetes.kind=job",
            ).saying(words)
        if "exceeded quota" in said:
            return KubectlError(
                f"the namespace's quota is used up: {words}",
                where=f"namespace {self.namespace}",
                remedy="ask for fewer nodes or less of launch.kubernetes.cpu, memory and gpus",
            ).saying(words)
        if re.search(r"namespaces \"[^\"]+\" not found", said):
            return NotFoundError(
                f"the cluster has no namespace {self.namespace}",
                where="launch.kubernetes.namespace",
                remedy="have it made, or use launch.kubernetes.namespace=default",
            ).saying(words)
        if "Unauthorized" in said or "must be logged in" in said:
            return KubectlError(
                f"the cluster does not accept the credentials: {words}",
                where=where,
                remedy="log in again",
            ).saying(words)
        if "(Forbidden)" in said or "is forbidden" in said:
            return KubectlError(
                f"this account may not do that: {words}",
                where=where,
                remedy="ask for the rights that docs/guide/kubernetes.md lists",
            ).saying(words)
        if "(NotFound)" in said:
            return NotFoundError(words, where=where).saying(words)
        return KubectlError(f"kubectl failed: {words}", where=where).saying(words)

    def _unreachable(self, words: str) -> KubectlError:
        return KubectlError(
            f"the Kubernetes API server does not answer: {words}",
            where=self.context or "the current context of kubectl",
            remedy="compare with kubectl cluster-info, or set launch.kubernetes.context",
        ).saying(words)


def shorten(said: str) -> str:
    """Return kubectl's last complaint as one line, without its own prefixes."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"(error|Error|Unable|The )", line)] or lines
    words = " ".join(told[-1:]) or "it said nothing"
    words = re.sub(r"^(error: |Error (from server|in configuration)( \(\w+\))?: )", "", words)
    words = re.sub(r"^error when \w+ing \"STDIN\": ", "", words)
    return words if len(words) <= _LONGEST_WORDS else words[: _LONGEST_WORDS - 1] + "…"
