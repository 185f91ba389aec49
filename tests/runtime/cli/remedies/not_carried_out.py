"""Messages with a remedy that no case carries out, each with its reason.

`test_remedies_of_rooms.py` fails for a message that is neither in a table nor here, and for one
that is here without need.
"""

from __future__ import annotations

NOT_CARRIED_OUT: dict[str, tuple[str, ...]] = {
    "needs a Ray cluster; the campaign provokes them (tests/system/test_ray_refusals.py)": (
        "launch/owners/ray/errors.py: ray cannot be imported here (…)",
        "launch/owners/ray/errors.py: no Ray cluster answers at … (…)",
        "launch/owners/ray/errors.py: Ray's head at …, which knows the nodes of this run, does "
        "not answer "
        "(…)",
        "launch/owners/ray/errors.py: what answers at … is no head of a Ray cluster (…)",
        "launch/owners/ray/errors.py: … does not answer as Ray's head does within … s",
        "launch/owners/ray/errors.py: this machine is not part of the Ray cluster at …",
        "launch/owners/ray/errors.py: the cluster at … has another Ray or Python than this "
        "machine: …",
        "launch/owners/ray/errors.py: no machine of the Ray cluster has what a node takes: …",
        "launch/owners/ray/errors.py: nodes of the run would share a machine: …",
        "launch/owners/ray/errors.py: the Ray cluster at … has nodes of this run already (job …)",
        "launch/owners/ray/errors.py: Ray cannot start a process of holdfast: …",
    ),
}
"""Reason -> the names of its messages (`sites.py`)."""
