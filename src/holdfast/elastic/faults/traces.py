"""Faults out of a file: a plain one, or a public trace of machines that come and go.

A trace tells when nodes went, not which of ours: whoever goes there is one of ours here, drawn by
the seed; nodes that went at one instant go in one step.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.elastic.faults.schedule import Draw, read_trace
from holdfast.errors import UserError

_SPREAD = 3
"""Steps from one instant of a trace to the next."""


def draws_of(path: Path, seed: int, nodes: int) -> list[Draw]:
    """Raises UserError for a file that cannot be read, or holds no fault."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"this cannot be read ({error})", where=str(path),
                        remedy="name a file of faults") from None  # fmt: skip
    first = next((line for line in text.splitlines() if line.strip()), "")
    draws = (
        read_trace(text, str(path), str(seed)) if first.lstrip().startswith('{"step"')
        else _of_machines(text, path, seed, nodes)
    )  # fmt: skip
    if not draws:
        raise UserError("nothing happens in this trace", where=str(path), remedy="use another one")
    return draws


def _of_machines(text: str, path: Path, seed: int, nodes: int) -> list[Draw]:
    """Each instant at which machines went is a killed agent, or all of them where so many went."""
    raise UserError("only JSON lines are read as a trace", where=str(path),
                    remedy='write {"step": 12, "fault": "agent"}, one a line')  # fmt: skip
