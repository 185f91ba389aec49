"""Which fault comes when: drawn from a seed, named one by one, or read from a file.

A draw is decided before the run begins, as far as it does not depend on who is alive then: the
fault, after how many steps, at which point, and a number by which rank and node are picked.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.elastic.faults.library import FAULTS, Fault
from holdfast.elastic.faults.shapes import Shape
from holdfast.errors import UserError

GAPS = (1, 2, 3, 3, 4, 5)
"""Steps from one fault to the next: about three."""


@dataclass(frozen=True)
class Draw:
    """points: of each part of the fault. pick: chooses rank and node among those that are there;
    target: names the node, where somebody did. step: at which it is due; 0: `gap` steps on.
    patient: it waits until all nodes are back."""

    fault: Fault
    points: tuple[str, ...]
    pick: int
    gap: int = 3
    step: int = 0
    target: str = ""
    patient: bool = True


def drawn(seed: str, names: Sequence[str]) -> Iterator[Draw]:
    """Without end. names: of which faults; some of them are drawn evenly, all of them by weight.
    The same seed gives the same draws."""
    chance = random.Random(f"chaos {seed}")
    faults = [FAULTS[name] for name in names]
    even = len(faults) < len(FAULTS)
    weights = [1 if even else fault.weight for fault in faults]
    while True:
        (fault,) = chance.choices(faults, weights)
        points = tuple(chance.choice(part.points) for part in fault.parts)
        yield Draw(
            fault, points, chance.randrange(1 << 16), chance.choice(GAPS),
            patient=chance.random() < 0.7,
        )  # fmt: skip


def unfit(draw: Draw, shape: Shape, network: str | None) -> str | None:
    """Why a draw makes no sense for a layout; None: it does. network: why there is none."""
    fault = draw.fault
    if fault.needs == "pp" and not shape.pipelined:
        return "the layout has no pipeline"
    if fault.needs == "network" and network is not None:
        return network
    if fault.nodes > shape.nodes:
        return f"it needs {fault.nodes} nodes"
    if fault.ranks > shape.ranks:
        return f"it needs {fault.ranks} ranks"
    if fault.needs == "shared" and not shape.shared:
        return "every replica holds the whole state"
    return None


def read_trace(text: str, source: str, seed: str) -> list[Draw]:
    """A plain file: one JSON object a line, {"step": 12, "fault": "agent", "target": "b"}.

    Raises UserError with file and line.
    """
    chance = random.Random(f"trace {seed}")
    draws = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{source}:{number}"
        try:
            row = json.loads(line)
            step, name, target = int(row["step"]), str(row["fault"]), str(row.get("target", ""))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                "this is not a fault at a step", where=where,
                remedy='write {"step": 12, "fault": "agent", "target": "b"}',
            ) from None  # fmt: skip
        if name not in FAULTS:
            raise UserError(f"there is no fault {name!r}", where=where,
                            remedy=f"use one of {', '.join(FAULTS)}")  # fmt: skip
        points = tuple(chance.choice(part.points) for part in FAULTS[name].parts)
        point = str(row.get("point", "")) or points[0]
        if point not in FAULTS[name].parts[0].points:
            raise UserError(
                f"{name} cannot be at {point!r}", where=where,
                remedy=f"use one of {', '.join(FAULTS[name].parts[0].points)}",
            )  # fmt: skip
        draws.append(
            Draw(FAULTS[name], (point, *points[1:]), chance.randrange(1 << 16), step=step,
                 target=target)
        )  # fmt: skip
    return sorted(draws, key=lambda draw: draw.step)


def names_of(text: str) -> tuple[int, list[str]]:
    """What `--faults` says: a number, names, or both ("30 kill,agent"). 0: no number given.

    Raises UserError."""
    number, names = 0, list[str]()
    for word in text.replace(",", " ").split():
        if word.isdigit():
            number = int(word)
        elif word in FAULTS:
            names.append(word)
        else:
            raise UserError(f"there is no fault {word!r}", where="--faults",
                            remedy=f"use a number, or some of {', '.join(FAULTS)}")  # fmt: skip
    return number, names or list(FAULTS)
