"""A trainer whose disk stops answering: `python -m tests.support.hung_disk_trainer SECONDS FOLDER
...`.

As `tests.support.toy_trainer`, until FOLDER.hung is there. SECONDS: what an agent has for the rest
then, once it has said its last word.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from holdfast.elastic.agent import agent
from holdfast.elastic.agent.run_folder_monitor import RunFolder
from holdfast.wire.store.run_store import FolderStore
from tests.support.toy_trainer import main


def beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.hung")


def _hang(hung: Path) -> None:
    look, append = RunFolder.check, FolderStore.append

    def wait() -> None:
        if hung.exists():
            threading.Event().wait()

    def looked(self: RunFolder) -> None:
        wait()
        look(self)

    def appended(self: FolderStore, *arguments: Any, **options: Any) -> None:
        wait()
        append(self, *arguments, **options)

    RunFolder.check = looked  # type: ignore[method-assign]
    FolderStore.append = appended  # type: ignore[method-assign]


if __name__ == "__main__":
    agent.CLEANUP_TIMEOUT_S = float(sys.argv.pop(1))
    _hang(beside(Path(sys.argv[1])))
    sys.exit(main())
