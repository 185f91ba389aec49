"""The shards of docs/guide/python.md, for data that can only be iterated over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "python.md"


@pytest.mark.parametrize("rows", [7, 8])
def test_a_stream_is_written_to_shards_and_read_by_number(rows: int, tmp_path: Path) -> None:
    block = next(b for b in PAGE.read_text().split("```python\n") if "class Shards" in b)
    names: dict[str, Any] = {}
    exec(block.split("```")[0], names)
    stream = ({"x": np.full(3, number), "y": number % 2} for number in range(rows))
    names["write_shards"](stream, tmp_path, size=4)
    read = names["Shards"](tmp_path, "v1")
    assert (len(read), read.version, len(list(tmp_path.iterdir()))) == (rows, "v1", 2)
    for index in (6, 0, 3, 4):
        assert read[index]["x"].tolist() == [index] * 3
        assert read[index]["y"] == index % 2
