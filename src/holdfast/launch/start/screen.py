"""The outputs of a start, and the question that only a person can answer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from holdfast.config.loading.load import LoadedConfig


class Progress(Protocol):
    """Shows how far the preparation of a dataset is."""

    def say(self, text: str) -> None: ...

    def show(self, what: str, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class Screen:
    """The outputs of a start."""

    say: Callable[[str], None]  # prints one line
    open_progress: Callable[[], AbstractContextManager[Progress]]
    confirm_cost: Callable[[LoadedConfig, float], None]  # US dollars; raises ConfigError for a no
