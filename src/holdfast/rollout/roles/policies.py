"""The weights of policies as files in a folder of this node.

    POLICY-TAG/part-I-of-N.safetensors

Each of the N ranks that publish a policy writes what it holds: boxes of the parameters, in the
precision that the run computes in. The boxes' places stand in the file's metadata. A file appears
at once and complete. The folder lies in memory (/dev/shm) if there is such a place.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.core.data.skips import Skips
from holdfast.errors import OutOfSpaceError
from holdfast.layout import Topology
from holdfast.rollout.roles.messages import PolicyPart
from holdfast.rollout.roles.weight_files import part_path
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.precision import Precision
from holdfast.training.engine.state import LocalTensor

_BOXES = "boxes"


def policy_tag(config: RunConfig, policy: int, skips: Skips) -> str:
    """Return a name of the policy's content: what the run file and skipped data make of the weights
    after that step."""
    return _tag(_sections(config), policy, skips)


def _sections(config: RunConfig) -> dict[str, Any]:
    """What the run file says of a policy's content."""
    sections = config.model_dump(mode="json", include={"seed", "model", "lora", "data", "rollout"})
    sections["train"] = config.train.model_dump(mode="json", exclude={"steps", "evaluate"})
    return sections


def _tag(sections: dict[str, Any], policy: int, skips: Skips) -> str:
    left_out = [each for each in skips.to_json() if each["step"] <= policy]
    text = json.dumps([sections, left_out, policy], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def publishing_ranks(topology: Topology, rank: int) -> tuple[int, ...]:
    """Return the ranks that publish together on the node of `rank`: those of its first replica that
    lies on it completely. Without one, those of the first replica of all."""
    node = topology.nodes[rank]
    for replica in topology.replicas:
        if all(topology.nodes[each] == node for each in replica.ranks):
            return tuple(replica.ranks)
    return tuple(topology.replicas[0].ranks)


class Publisher:
    """Writes the policies of one rank into the folder. Belongs to the training thread, which copies
    weights. A thread of its own writes them while the next step is computed."""

    def __init__(self, folder: Path, config: RunConfig, agent: str) -> None:
        self._folder, self._config, self._agent = folder, config, agent
        self._sections = _sections(config)
        self._published: dict[int, PolicyPart] = {}
        self._pool = ThreadPoolExecutor(1, "publish")
        self._writing: Future[None] | None = None

    @property
    def parts(self) -> tuple[PolicyPart, ...]:
        """Return what this rank has published and kept."""
        return tuple(dict(self._published).values())

    def publish_all(self, engine: StepEngine, skips: Skips, step: int) -> None:
        """Publish every policy that completions may still be asked of, at a generation's start, and
        wait until they are written. step: the state is that after it."""
        self._published = {}
        for age in range(self._config.rollout.lag, -1, -1):
            if step - age >= 0:
                self._publish(engine, skips, step - age, age)
        self.flush()

    def publish_newest(self, engine: StepEngine, skips: Skips, step: int) -> None:
        """Publish the policy after a step that was just applied, and remove the one that is not
        needed now. Raises OutOfSpaceError if the one before could not be written."""
        self._publish(engine, skips, step, 0)

    def flush(self) -> None:
        """Wait until all is written. Raises OutOfSpaceError."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _publish(self, engine: StepEngine, skips: Skips, policy: int, age: int) -> None:
        topology, rank = engine.groups.topology, engine.groups.rank
        ranks = publishing_ranks(topology, rank)
        if rank not in ranks:
            return
        tag = _tag(self._sections, policy, skips)
        part = PolicyPart(policy, tag, ranks.index(rank), len(ranks), self._agent)
        self.flush()
        content: _Content | None = None
        if not part_path(self._folder, part).exists():
            dtype = Precision.of(self._config.train.precision).compute
            content = _copy(engine.lagged.of_age(age, ""), dtype)
        self._writing = self._pool.submit(self._write, part, content)

    def _write(self, part: PolicyPart, content: _Content | None) -> None:
        if content is not None:
            _write(part_path(self._folder, part), content)
        self._published[part.policy] = part
        oldest = part.policy - self._config.rollout.lag
        for policy in [p for p in self._published if p < oldest]:
            path = part_path(self._folder, self._published.pop(policy))
            path.unlink(missing_ok=True)
            with suppress(OSError):  # another rank's part is there
                path.parent.rmdir()


@dataclass(frozen=True)
class _Content:
    """What a rank holds of a policy."""

    tensors: dict[str, Tensor]  # copies on the CPU
    boxes: dict[str, list[list[int]]]  # offsets, and the shape of the complete tensor


def _copy(tensors: Sequence[LocalTensor], dtype: torch.dtype) -> _Content:
    full = [local for local in tensors if local.tensor.numel()]
    boxes = {local.name: [list(local.offsets), list(local.global_shape)] for local in full}
    copies = {t.name: t.tensor.detach().to("cpu", dtype, copy=True).contiguous() for t in full}
    return _Content(copies, boxes)


def _write(path: Path, content: _Content) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}-{threading.get_native_id()}.tmp")
        save_file(content.tensors, temporary, {_BOXES: json.dumps(content.boxes)})
        temporary.replace(path)
    except OSError as error:
        raise OutOfSpaceError(
            f"the weights for the actors cannot be written: {error.strerror or error}",
            where=str(path.parent.parent),
            remedy="free some memory or space there, or lower rollout.lag",
        ) from error


def has_policy(folder: Path, parts: Iterable[PolicyPart]) -> bool:
    """Return True if all parts of a policy lie in the folder."""
    found = {part.part for part in parts if part_path(folder, part).exists()}
    wanted = {part.parts for part in parts}
    return len(wanted) == 1 and len(found) == wanted.pop()


def fetch_policy(
    folder: Path, parts: Sequence[PolicyPart], fetch: Callable[[PolicyPart], bytes]
) -> None:
    """Bring the missing parts of a policy into the folder, from whichever agent has them. Raises
    what `fetch` raises if none has."""
    for number in range(parts[0].parts):
        places = [part for part in parts if part.part == number]
        path = part_path(folder, places[0])
        if path.exists():
            continue
        problem: Exception | None = None
        for place in places:
            try:
                content = fetch(place)
                break
            except Exception as error:
                problem = error
        else:
            assert problem is not None, "the queue names a place for each part"
            raise problem
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(content)
        temporary.replace(path)


def read_policy(folder: Path, part: PolicyPart) -> dict[str, Tensor]:
    """Return the complete parameters of a policy. Raises OSError if a file is missing."""
    found: dict[str, Tensor] = {}
    for number in range(part.parts):
        path = part_path(folder, PolicyPart(part.policy, part.tag, number, part.parts, ""))
        with safe_open(path, "pt") as file:
            boxes = json.loads(file.metadata()[_BOXES])
            for name, (offsets, shape) in boxes.items():
                value = file.get_tensor(name)
                if list(value.shape) == shape:
                    found[name] = value
                    continue
                whole = found.setdefault(name, torch.empty(shape, dtype=value.dtype))
                cut = [slice(o, o + n) for o, n in zip(offsets, value.shape, strict=True)]
                whole[tuple(cut)] = value
    return found
