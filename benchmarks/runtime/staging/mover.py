"""A real mover whose run store keeps its blobs in the network storage of the comparison:
`python -m benchmarks.runtime.staging.mover ADDRESS`, then as `holdfast.checkpoint.mover.main`."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.runtime.staging.storage import NetworkStore, Storage
from holdfast.checkpoint.mover import main as mover
from holdfast.wire.store.run_store import RunStore


def main() -> None:
    storage = Storage(sys.argv[1])

    def opened(location: str | Path) -> RunStore:
        return NetworkStore(str(location), storage)

    mover.open_store = opened  # type: ignore[attr-defined]
    mover.main()


if __name__ == "__main__":
    main()
