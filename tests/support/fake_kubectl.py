"""A `kubectl` on PATH that notes its calls and answers from a table."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml


@dataclass
class FakeKubectl:
    """answers: part of a command line -> what is printed, and the exit code. The last one that fits
    counts. What is not in the table ends with 0 and prints nothing."""

    folder: Path
    answers: dict[str, tuple[str, int]] = field(default_factory=dict)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
        self.write()
        monkeypatch.setenv("PATH", str(self.folder), prepend=os.pathsep)
        return self

    def says(self, part: str, told: Any, code: int = 0) -> FakeKubectl:
        """told: text, or a value that is printed as JSON."""
        self.answers[part] = (told if isinstance(told, str) else json.dumps(told)), code
        self.write()
        return self

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = ["#!/bin/sh", f"cd {shlex.quote(str(self.folder))}", 'echo "$*" >> calls']
        lines += ['case "$*" in *" apply "*) cat >> applied ;; esac', 'case "$*" in']
        for number, (part, (told, code)) in enumerate(reversed(self.answers.items())):
            (self.folder / f"answer{number}").write_text(told)
            stream = " >&2" if code else ""
            lines.append(f"*{shlex.quote(part)}*) cat answer{number}{stream}; exit {code} ;;")
        script = self.folder / "kubectl"
        script.write_text("\n".join([*lines, "esac", ""]))
        script.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def applied(self) -> list[dict[str, Any]]:
        return list(yaml.safe_load_all((self.folder / "applied").read_text()))


def listing(*items: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}
