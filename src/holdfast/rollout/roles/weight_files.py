"""The places of the files of policies, and the answers of an agent that serves them. No torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from holdfast.rollout.roles.messages import PolicyPart, WeightsAsk, WeightsPiece

MAX_PIECE_BYTES = 16 << 20
_MEMORY = Path("/dev/shm")


def node_folder(run_folder: Path, node: str, pid: int) -> Path:
    """Return the folder of an agent's node: in memory if there is a place for files there."""
    run = hashlib.blake2b(str(run_folder.absolute()).encode(), digest_size=6).hexdigest()
    name = f"holdfast-{run}-{node}-{pid}"
    return _memory(run_folder / "policies") / name


def remove_leftovers(folder: Path) -> None:
    """Remove the folders that killed processes have left next to this one: the same name but for
    the process id."""
    prefix, _, own = folder.name.rpartition("-")
    for each in folder.parent.glob(f"{prefix}-*"):
        pid = each.name.rpartition("-")[2]
        if pid != own and pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(each, ignore_errors=True)


def own_folder(pid: int) -> Path:
    """Make a folder for a policy that an actor fetches from another node."""
    folder = _memory(Path(tempfile.gettempdir())) / f"holdfast-policies-{pid}"
    remove_leftovers(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _memory(otherwise: Path) -> Path:
    """Return a place for files in memory, if there is one."""
    return _MEMORY if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) else otherwise


def policy_folder(folder: Path, part: PolicyPart) -> Path:
    return folder / f"{part.policy:010d}-{part.tag}"


def part_path(folder: Path, part: PolicyPart) -> Path:
    return policy_folder(folder, part) / f"part-{part.part}-of-{part.parts}.safetensors"


def read_piece(folder: Path, asked: WeightsAsk) -> WeightsPiece:
    """Return a piece of a file. Raises ValueError for a name that is none of ours."""
    if not asked.policy_tag.isalnum() or asked.offset < 0 or asked.length < 1:
        raise ValueError("no such piece")
    part = PolicyPart(asked.policy, asked.policy_tag, asked.part, asked.parts, "")
    try:
        with part_path(folder, part).open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            file.seek(asked.offset)
            return WeightsPiece(total, file.read(min(asked.length, MAX_PIECE_BYTES)))
    except OSError:
        return WeightsPiece(-1, b"")
