"""Messages between agents and the coordinator, with their HTTP paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.elastic.protocol.generation_outcome import NodeOutcome

JOIN, BEAT = "/join", "/beat"


JOIN_FIRST, REPLACED = "join", "replaced"
"""Orders to whom the coordinator does not know, or knows as another process by now."""


HANG = "hang"
"""Why a generation is ended in which all wait."""


@dataclass
class Known:
    """What an agent said of itself, beyond what the decisions need. told: when it joined. held:
    what its workers hold, once they have stopped, and how its last generation ended there: `at`;
    None: nothing yet."""

    told: Mapping[str, Any]
    held: NodeOutcome | None = None
    at: int = 0
