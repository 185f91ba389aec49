"""Messages with a remedy that no case carries out, each with its reason.

`test_remedies_of_rooms.py` fails for a message that is neither in a table nor here, and for one
that is here without need.
"""

from __future__ import annotations

NOT_CARRIED_OUT: dict[str, tuple[str, ...]] = {
    "it needs an accelerator, which the machine of the tests lacks": (
        "cli/train.py: … is here, but torch was built for the CPU alone",
        "train/precision.py: … gives other bits each time on this device",
    ),
    "it speaks of code: a task's author changes a line of it": (
        "tasks/module.py: flops() returned …",
        "tasks/task_export.py: exported() returned …, as for another one | exported() returned …",
        "tasks/task_export.py: exported() returned None for each parameter",
    ),
}
"""Reason -> the names of its messages (`sites.py`)."""
