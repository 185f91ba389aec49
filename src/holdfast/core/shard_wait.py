"""A rank that has to wait for a shard of its dataset."""

from __future__ import annotations

from holdfast.events import Event


class ShardAwaited(Event, kind="shard_awaited"):
    """A batch waits for a shard, since the dataset's address does not answer. Written once for each
    wait, and once more, without a reason, when the shard is here."""

    rank: int
    key: str
    reason: str = ""

    @property
    def text(self) -> str:
        if self.reason:
            return f"rank {self.rank} waits for {self.key} of the dataset: {self.reason}"
        return f"{self.key} of the dataset, which rank {self.rank} waited for, is here"
