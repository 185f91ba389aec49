from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mover_process import Mover


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Mover]]:
    """Start a mover on the test's run folder; every one is ended with the test."""
    movers: list[Mover] = []

    def make(at: str | None = None, **settings: Any) -> Mover:
        movers.append(Mover(at or tmp_path / "run", **settings))
        return movers[-1]

    (tmp_path / "run").mkdir()
    yield make
    for mover in movers:
        mover.close()
