"""What becomes of a restore whose source fails, rather than its bytes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.checkpoint.peers.client import PeerError
from holdfast.elastic.worker.restore import CorruptCheckpointError, _load_with_retry
from holdfast.errors import HoldfastError, StoreError


def load(folder: Path, *ends: HoldfastError | None) -> int:
    """Load with an engine whose reads end so, one after the other; how often it was asked."""
    left = list(ends)

    def once(boxes: object) -> None:
        if (end := left.pop(0)) is not None:
            raise end

    session: Any = SimpleNamespace(engine=SimpleNamespace(load=once))
    _load_with_retry(session, cast(Any, None), str(folder))
    return len(ends) - len(left)


def test_a_source_that_fails_once_is_asked_again(tmp_path: Path) -> None:
    assert load(tmp_path, None) == 1
    assert load(tmp_path, PeerError("it broke off"), None) == 2
    assert load(tmp_path, StoreError("it broke off"), None) == 2


def test_what_a_failing_peer_alone_holds_is_given_up(tmp_path: Path) -> None:
    """The next older state is begun from, rather than this one tried until the run gives up."""
    with pytest.raises(CorruptCheckpointError, match=r"cannot be read: 10\.0\.0\.7 broke off"):
        load(tmp_path, PeerError("10.0.0.7 broke off"), PeerError("10.0.0.7 broke off"))
    with pytest.raises(CorruptCheckpointError, match="it cannot be read"):
        load(tmp_path, StoreError("away"), PeerError("10.0.0.7 broke off"))
