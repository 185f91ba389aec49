"""The order of faults: drawn from a seed, named one by one, or read from a file.

A draw is decided before the run begins: the fault, after how many steps, at which point. Rank and
node depend on the nodes alive then, so a draw has a number by which they are picked.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.errors import UserError, unknown_name, use_one_of
from holdfast_lab.chaos.catalog import FAULTS, FOLDER_ACTIONS, Fault
from holdfast_lab.chaos.layouts import ChaosLayout, parse_natural

FAULT_GAPS_STEPS = (1, 2, 3, 3, 4, 5)
"""Steps from one fault to the next: about three."""
MAX_STEP = 10**9


@dataclass(frozen=True)
class Draw:
    """points: of each part of the fault. pick_number: chooses rank and node among those present.
    target: the node, if a user named one. step: at which it is due; 0: `gap` steps later.
    waits_for_nodes: it waits until all nodes are back. where: file and line that ask for it."""

    fault: Fault
    points: tuple[str, ...]
    pick_number: int
    gap: int = 3
    step: int = 0
    target: str = ""
    waits_for_nodes: bool = True
    where: str = ""


def draw_faults(seed: str, fault_names: Sequence[str]) -> Iterator[Draw]:
    """Without end. fault_names: of which faults, evenly; where none is named, of all by their
    weights. The same seed gives the same draws."""
    chance = random.Random(f"chaos {seed}")
    faults = [FAULTS[name] for name in fault_names] or list(FAULTS.values())
    weights = [1 if fault_names else fault.weight for fault in faults]
    while True:
        (fault,) = chance.choices(faults, weights)
        points = tuple(chance.choice(part.points) for part in fault.parts)
        yield Draw(
            fault,
            points,
            chance.randrange(1 << 16),
            chance.choice(FAULT_GAPS_STEPS),
            waits_for_nodes=chance.random() < 0.7,
        )


def node_names(shape: ChaosLayout) -> list[str]:
    return [chr(ord("a") + index) for index in range(shape.nodes)]


def check_faults_possible(
    faults: Sequence[Fault],
    draws: Sequence[Draw],
    shape: ChaosLayout,
    why_no_network: str | None,
    *,
    in_bucket: bool = False,
) -> None:
    """Raises UserError if none of the requested faults can happen in a layout, or if one names an
    unknown node. draws: of a trace, or none. why_no_network, in_bucket: see `why_unfit`."""
    for draw in draws:
        if draw.target and draw.target not in node_names(shape):
            raise UserError(
                f"there is no node {draw.target!r} in {shape.name}",
                where=draw.where,
                remedy=use_one_of(node_names(shape)),
            )
    asked = list(dict.fromkeys([draw.fault for draw in draws] or faults))
    why = {each.name: why_unfit(each, shape, why_no_network, in_bucket=in_bucket) for each in asked}
    if all(why.values()):
        told = ", ".join(f"{name} ({reason})" for name, reason in why.items())
        raise UserError(
            f"none of these faults can happen in {shape.name}: {told}",
            where="--trace" if draws else "--faults",
            remedy="name others, or another --layout",
        )


def why_unfit(
    fault: Fault, shape: ChaosLayout, why_no_network: str | None, *, in_bucket: bool = False
) -> str | None:
    """Why a fault makes no sense for a layout; None: it does. why_no_network: why there is none.
    in_bucket: the run store is a bucket, which has no files to break."""
    if in_bucket and any(part.action in FOLDER_ACTIONS for part in fault.parts):
        return "the run store is a bucket"
    if fault.needs == "pp" and not shape.is_pipelined:
        return "the layout has no pipeline"
    if fault.needs == "network" and why_no_network is not None:
        return why_no_network
    if fault.nodes > shape.nodes:
        return f"it needs {fault.nodes} nodes"
    if fault.ranks > shape.ranks:
        return f"it needs {fault.ranks} ranks"
    if fault.needs == "shared" and not shape.has_shared_state:
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
            step, name = row["step"], str(row["fault"])
            target, point = str(row.get("target") or ""), str(row.get("point") or "")
            if type(step) is not int or not 1 <= step <= MAX_STEP:
                raise ValueError(step)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(
                "this is not a fault at a step",
                where=where,
                remedy='write {"step": 12, "fault": "agent", "target": "b"}',
            ) from None
        if name not in FAULTS:
            raise unknown_name(UserError, "fault", name, FAULTS, where)
        draws.append(_parse_row(chance, FAULTS[name], step, target, point, where))
    return sorted(draws, key=lambda draw: draw.step)


def _parse_row(
    chance: random.Random, fault: Fault, step: int, target: str, point: str, where: str
) -> Draw:
    points = tuple(chance.choice(part.points) for part in fault.parts)
    if (point or points[0]) not in fault.parts[0].points:
        raise UserError(
            f"{fault.name} cannot be at {point!r}",
            where=where,
            remedy=use_one_of(fault.parts[0].points),
        )
    if target and not fault.is_aimed:
        raise UserError(
            f"{fault.name} cannot be aimed at a node",
            where=where,
            remedy="leave out its target, or use one of "
            f"{', '.join(name for name, each in FAULTS.items() if each.is_aimed)}",
        )
    return Draw(
        fault,
        (point or points[0], *points[1:]),
        chance.randrange(1 << 16),
        step=step,
        target=target,
        where=where,
    )


def is_trace_of_faults(text: str) -> bool:
    """Return True if any line looks like one that `read_trace` reads, even with a mistake in it."""
    return any(
        line.lstrip().startswith("{") and ('"step"' in line or '"fault"' in line)
        for line in text.splitlines()
    )


def parse_faults_option(text: str) -> tuple[int, list[str]]:
    """What `--faults` says: a number, names, or both ("30 kill,agent"). 0: no number given; no
    names: all faults, by their weights.

    Raises UserError."""
    number, names = 0, list[str]()
    for word in text.replace(",", " ").split():
        if found := parse_natural(word):
            number = found
        elif word in FAULTS:
            names.append(word)
        else:
            raise UserError(
                f"there is no fault {word!r}",
                where="--faults",
                remedy=f"use a number, or some of {', '.join(FAULTS)}",
            )
    return number, names


_STEPS_BETWEEN_INSTANTS = 3  # steps from one instant of a trace to the next


def draws_of_trace(shares: Iterable[float], seed: int, nodes: int) -> list[Draw]:
    """Faults out of a trace, which tells how many machines were lost and when, not which of ours.

    shares: of the machines that were there, how many went, instant by instant. Each instant is a
    fault that hits as large a part of our nodes. Nodes come back by themselves."""
    chance = random.Random(f"trace {seed}")
    draws = []
    for share in shares:
        gone = max(1, round(share * nodes))
        name = "everything" if gone >= nodes else "two-agents" if gone > 1 else "agent"
        fault = FAULTS[name if FAULTS[name].nodes <= nodes else "agent"]
        points = tuple(chance.choice(part.points) for part in fault.parts)
        draws.append(Draw(fault, points, chance.randrange(1 << 16), _STEPS_BETWEEN_INSTANTS))
    return draws
