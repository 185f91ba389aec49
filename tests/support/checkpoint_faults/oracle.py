"""The expected result of a restore, computed without any code of the product. It compares the bytes
in the store with those that were written.

A checkpoint is *intact* if its commit object, its blobs and its part manifests are as they were
written. It is *readable* if commit object and tensor data are, but a part manifest or a blob's own
header is not. Then its tensors are complete, but verify must complain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Position = tuple[int, int]
"""(step, generation)"""


@dataclass(frozen=True)
class Expected:
    """allowed: any of these is right (more than one only if the newest are readable but not
    intact). `must`: there is an intact one, so a refusal is wrong. candidates: commit objects."""

    allowed: tuple[Position, ...]
    must: bool
    candidates: int
    broken: tuple[str, ...]  # commit objects that verify must report as damaged


def expected(found: Mapping[str, bytes], written: Mapping[str, bytes]) -> Expected:
    """found: what lies in the store. written: everything that was ever written, intact."""
    allowed: list[Position] = []
    broken: list[str] = []
    must = False
    commits = [key for key in found if key.startswith("commits/")]
    for key in sorted(written):  # the step is inverted in the key: newest first
        if not key.startswith("commits/"):
            continue
        commit: dict[str, Any] = json.loads(written[key])
        state = _state(commit, found, written) if found.get(key) == written[key] else "gone"
        if state != "whole" and key in found:
            broken.append(key)
        if state != "gone" and not must:
            allowed.append((commit["step"], commit["generation"]))
            must = state == "whole"
    return Expected(tuple(allowed), must, len(commits), tuple(broken))


def _state(commit: dict[str, Any], found: Mapping[str, bytes], written: Mapping[str, bytes]) -> str:
    state = "whole"
    for writer in commit["writers"]:
        key, start = writer["blob"]["key"], writer["blob"]["data_start"]
        is_, was = found.get(key), written[key]
        if is_ is None or is_[start : len(was)] != was[start:]:
            return "gone"
        part = part_of(key)
        if is_ != was or found.get(part) != written[part]:
            state = "readable"
    return state


def part_of(blob: str) -> str:
    """Return the key of a blob's part manifest."""
    stem = blob.removeprefix("data/").removesuffix(".safetensors").rpartition("-")[0]
    return f"parts/{stem}.json"
