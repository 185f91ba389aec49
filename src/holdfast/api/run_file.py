"""A run file in a script: its values, where they come from, and the same file with other values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.config.loading.load import LoadedConfig


class RunFile:
    """A run file with overrides. It does not change; `changed` makes another."""

    def __init__(self, path: Path, overrides: tuple[str, ...], loaded: LoadedConfig) -> None:
        self.path, self.overrides, self._loaded = path, overrides, loaded

    @property
    def values(self) -> dict[str, Any]:
        """All values, defaults too, as nested dicts."""
        return self._loaded.config.model_dump(mode="json")

    def __getitem__(self, key: str) -> Any:
        """Return the value of a dotted key or a section. Raises KeyError."""
        found: Any = self.values
        for part in key.split("."):
            try:
                found = found[int(part)] if isinstance(found, list) else found[part]
            except (ValueError, IndexError, TypeError, KeyError):
                raise KeyError(key) from None
        return found

    def origin(self, key: str) -> str:
        """Return where the value of a key comes from. Raises KeyError."""
        return str(self._loaded.origins[key])

    def changed(self, values: Mapping[str, Any]) -> RunFile:
        """Return the same file with other values by dotted key. Raises ConfigError."""
        given = tuple(f"{key}={json.dumps(value)}" for key, value in values.items())
        return load_run_file(self.path, (*self.overrides, *given))


def load_run_file(path: str | Path, overrides: tuple[str, ...] = ()) -> RunFile:
    """Read and check a run file. overrides: `key=value`, as on the command line. Raises
    ConfigError."""
    from holdfast.config.loading.load import load_config

    return RunFile(Path(path), tuple(overrides), load_config(Path(path), overrides))
