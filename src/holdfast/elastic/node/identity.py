"""Looks up a node's `NodeIdentity`: its code, its torch, its processor. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from holdfast.config.loading.identity import values_alike_on_all_nodes
from holdfast.config.run import RunConfig
from holdfast.core.devices import is_accelerator
from holdfast.machine.hardware import detect_hardware, torch_version_file
from holdfast.machine.processor import processor_identity
from holdfast.policy.membership.node_identity import NodeIdentity

_ACCELERATOR_LIBRARY = re.compile(r"(nvidia-|triton|pytorch-triton|intel-|mkl)")
_BUILD_LINE = re.compile(r"^(__version__|git_version|cuda|hip)\b[^=]*=\s*(.*)$", re.MULTILINE)
_DIGEST_BYTES = 8


def find_identity(
    config: RunConfig, reference: str, environment: Mapping[str, str] | None = None
) -> NodeIdentity:
    """Return this node's identity. reference: the fork server's checksum, "" if it has none."""
    return NodeIdentity(
        code_digest(),
        torch_build(),
        values_alike_on_all_nodes(config.model_dump(mode="json")),
        {
            **processor_identity(os.environ if environment is None else environment),
            **_device_identity(config),
        },
        reference,
    )


def code_digest(package: Path | None = None) -> str:
    """Return a digest of the package's sources."""
    root = Path(__file__).parents[2] if package is None else package
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def torch_build() -> str:
    """Return torch's version and build, and a digest of the libraries that it computes with."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return ""
    parts = [f"{line[1]}={line[2]}" for line in _BUILD_LINE.finditer(torch_version_file())]
    parts += sorted(
        f"{name}=={one.version}"
        for one in distributions()
        if (name := (one.metadata["Name"] or "").lower()) and _ACCELERATOR_LIBRARY.match(name)
    )
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=_DIGEST_BYTES)
    return f"{found} (build {digest.hexdigest()})"


def _device_identity(config: RunConfig) -> dict[str, str]:
    """Return the names of the accelerators that the run would use here."""
    if not is_accelerator(config.device):
        return {}
    here = detect_hardware().accelerators
    return {"devices": ", ".join(sorted({d.name for d in here if d.kind == config.device}))}
