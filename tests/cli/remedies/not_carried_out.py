"""Messages with a remedy that no case carries out, each with its reason. There are none today.

`test_remedies_of_rooms.py` fails for a message that is neither in a table nor here, and for one
that is here without need.
"""

from __future__ import annotations

NOT_CARRIED_OUT: dict[str, tuple[str, ...]] = {}
"""Reason -> the names of its messages (`sites.py`)."""
