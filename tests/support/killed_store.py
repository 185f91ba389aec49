"""A run store in a real folder, whose process is killed at one point of what it writes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator

from holdfast.wire.store.run_store import Buffer, FolderStore
from holdfast.wire.store.run_store import byte_views as flat


class Killing(FolderStore):
    """A real folder, and a real kill at one point."""

    def __init__(self, folder: str, point: int) -> None:
        super().__init__(folder)
        self.left = point

    def pass_point(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        def watched() -> Iterator[Buffer]:
            for part in flat(data):
                half = len(part) // 2
                yield part[:half]
                self.pass_point()  # in the middle of the bytes
                yield part[half:]

        super().create(key, watched())
        self.pass_point()

    def delete(self, key: str) -> None:
        super().delete(key)
        self.pass_point()
