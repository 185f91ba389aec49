"""JSON from outside: a file of a store, a body from a peer, a line from a socket.

For a text that nests too deep, `json.loads` raises RecursionError. Code that expects corrupt bytes
does not catch it. So one file of 100,000 brackets would end a run that could resume from an older
state. Here it is a ValueError, as for any other text that is not JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""The value of a JSON text."""
JsonObject: TypeAlias = dict[str, Json]
"""What the `to_json` of a message returns."""


def parse_json(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text. Raises ValueError for what is none, or nests too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
