"""The note in a run folder that its checkpoints are sealed, and where the key lies.

Every process opens a run folder by its path alone. The file `seal.json` makes it open the same
store each time: with the key that the run was begun with, or not at all. It holds no secret.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.core.json_parsing import parse_json
from holdfast.errors import RunFolderError
from holdfast.wire.store.publish import replace_file
from holdfast.wire.store.run_store import translate_os_error

SEAL_FILE = "seal.json"


@dataclass(frozen=True)
class FolderSeal:
    """How the checkpoints in a folder are sealed."""

    source: str  # path of the file with the key, or "env"
    key_id: str  # hexadecimal; which key it is


def read_seal(folder: Path) -> FolderSeal | None:
    """Return how the checkpoints in a folder are sealed; None if they are not. Raises
    RunFolderError for a file that does not say it."""
    path = folder / SEAL_FILE
    try:
        value = parse_json(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        value = None
    except OSError as error:
        raise translate_os_error(error, path) from error
    if isinstance(value, dict) and all(isinstance(value.get(k), str) for k in ("source", "key_id")):
        return FolderSeal(value["source"], value["key_id"])
    raise RunFolderError(
        "this file does not say which key the checkpoints are sealed with",
        where=str(path),
        remedy='write {"source": "PATH OF THE KEY", "key_id": ""}',
    )


def write_seal(folder: Path, seal: FolderSeal) -> None:
    """Note how the checkpoints in a folder are sealed, which is made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / SEAL_FILE, json.dumps(asdict(seal)) + "\n")
    except OSError as error:
        raise translate_os_error(error, folder) from error
