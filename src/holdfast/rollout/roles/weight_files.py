"""Where the files of policies lie, and the answers of an agent that serves them. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.rollout.roles.messages import PolicyPart, WeightsAsk, WeightsPiece

MAX_PIECE_BYTES = 16 << 20
_MEMORY = Path("/dev/shm")


def node_folder(run_folder: Path, node: str, pid: int) -> Path:
    """Return the folder of an agent's node: in memory if there is a place for files there."""
    name = f"holdfast-{run_folder.name}-{node}-{pid}"
    if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK):
        return _MEMORY / name
    return run_folder / "policies" / name


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
