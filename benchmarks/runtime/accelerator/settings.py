"""What every row of a table is given, and what it gives back. It imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Settings:
    """device: cpu or cuda. quick: tiny sizes, to see that the command works. scratch: a folder
    that all rows share. workers: how many train together, each on a device of its own."""

    device: str
    quick: bool
    scratch: Path
    workers: int = 1

    @property
    def torch_device(self) -> torch.device:
        """The first device."""
        import torch

        return torch.device("cpu") if self.device == "cpu" else torch.device(self.device, 0)


@dataclass(frozen=True)
class RowResult:
    """line: for the table. figures: for the file. passed: False where a promise does not hold or a
    bar is missed."""

    line: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    passed: bool = True
