"""Places of pods: spread as by a scheduler that knows no racks, or together. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

from holdfast_lab.admission.fabric import Fabric


def spread(free: Sequence[int], pods: int, devices: int, draw: Random) -> list[int] | None:
    """Nodes of so many pods, each on a node with most devices free (Kubernetes: LeastAllocated),
    at random among equals. None: they do not all fit."""
    room = list(free)
    chosen: list[int] = []
    for _ in range(pods):
        most = max(room)
        if most < devices:
            return None
        node = draw.choice([number for number, left in enumerate(room) if left == most])
        room[node] -= devices
        chosen.append(node)
    return sorted(chosen)


def pack(
    fabric: Fabric, free: Sequence[int], pods: int, devices: int, avoid: Collection[int] = ()
) -> list[int] | None:
    """Nodes of so many pods, as near to each other as they fit. None: they do not all fit.

    The smallest sufficient rack is taken. If there is none, the pods take few racks of the
    smallest sufficient zone, or at last few racks of all (Kueue: topology, preferred). In a rack
    the fullest nodes come first, so that empty ones stay empty. avoid: nodes that are kept
    for another job.
    """
    if sum(free) < pods * devices:
        return None
    slots = [0 if n in avoid else left // devices for n, left in enumerate(free)]
    rack_slots = [sum(slots[n] for n in rack) for rack in fabric.racks]
    fitting = [rack for rack, number in enumerate(rack_slots) if number >= pods]
    if fitting:
        rack = min(fitting, key=lambda r: (rack_slots[r], _fullest(free, fabric.racks[r], slots)))
        return _fill([rack], fabric, free, slots, pods)
    zone_slots = [sum(rack_slots[r] for r in zone) for zone in fabric.zones]
    zones = [zone for zone, number in enumerate(zone_slots) if number >= pods]
    if zones:
        racks = list(fabric.zones[min(zones, key=lambda z: zone_slots[z])])
    elif sum(zone_slots) >= pods:
        order = sorted(range(len(zone_slots)), key=lambda z: -zone_slots[z])
        racks = [rack for zone in order for rack in fabric.zones[zone]]
        return _fill(racks, fabric, free, slots, pods)
    else:
        return None
    racks.sort(key=lambda r: -rack_slots[r])
    return _fill(racks, fabric, free, slots, pods)


def add_near(
    fabric: Fabric,
    free: Sequence[int],
    nodes: Sequence[int],
    more: int,
    devices: int,
    avoid: Collection[int] = (),
) -> list[int]:
    """Up to `more` further nodes for a job: of its racks, then of its zones, then any."""
    racks, zones = fabric.racks_of(nodes), fabric.zones_of(nodes)
    usable = [node for node in fabric.nodes if free[node.number] >= devices]
    usable = [node for node in usable if node.number not in avoid]
    usable.sort(
        key=lambda n: (n.rack not in racks, n.zone not in zones, n.rack, free[n.number], n.number)
    )
    chosen: list[int] = []
    for node in usable:
        chosen += [node.number] * min(more - len(chosen), free[node.number] // devices)
    return chosen


def drop_far(fabric: Fabric, nodes: Sequence[int], number: int) -> list[int]:
    """The nodes that a job keeps if it gives so many pods back: those of its fullest racks."""
    counts: dict[int, int] = {}
    for node in nodes:
        rack = fabric.nodes[node].rack
        counts[rack] = counts.get(rack, 0) + 1
    ordered = sorted(nodes, key=lambda n: (-counts[fabric.nodes[n].rack], fabric.nodes[n].rack, n))
    return sorted(ordered[: len(nodes) - number])


def _fullest(free: Sequence[int], rack: Sequence[int], slots: Sequence[int]) -> int:
    return min(free[n] for n in rack if slots[n])


def _fill(
    racks: Sequence[int], fabric: Fabric, free: Sequence[int], slots: Sequence[int], pods: int
) -> list[int]:
    chosen: list[int] = []
    for rack in racks:
        for node in sorted(fabric.racks[rack], key=lambda n: (free[n], n)):
            chosen += [node] * min(slots[node], pods - len(chosen))
    return sorted(chosen)
