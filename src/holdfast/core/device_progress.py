"""How far a device is with the exchanges of its groups, and which device the rest waits for.

A device works through what its worker has launched, in order. If one of its kernels hangs, its
worker launches on, and no thread of it shows the hang. But the device does not reach the next
exchange, in which the devices of the other ranks then wait. Pure: counts are the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.json_parsing import JsonRow


@dataclass(frozen=True)
class GroupProgress(JsonRow):
    """Exchanges of one rank in one group: launched, reached by its device, and done there.

    group: its name, which is the same on all its ranks.
    """

    group: str
    launched: int
    reached: int
    done: int


def find_late_devices(progress: Mapping[int, Sequence[GroupProgress]]) -> dict[int, GroupProgress]:
    """Return the ranks whose devices have not reached an exchange in which other devices wait, with
    that group. A rank whose own device waits in another exchange is not returned.

    progress: of each rank, when none has made progress for long.
    """
    furthest: dict[str, int] = {}
    for groups in progress.values():
        for each in groups:
            furthest[each.group] = max(furthest.get(each.group, 0), each.reached)
    found = {}
    for rank, groups in progress.items():
        late = [each for each in groups if each.reached < furthest[each.group]]
        if late and not any(each.done < each.reached for each in groups):
            found[rank] = late[0]
    return found
