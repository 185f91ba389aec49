"""The toy trainer, which also writes the paths of its guarded listeners to `paths.json`:
`python -m tests.support.attacked_trainer FOLDER [key=value ...]`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from holdfast.wire.http.server import SignedApplication
from tests.support import toy_trainer as drive

_make = SignedApplication.__init__
_found: dict[str, bool] = {}  # path: True if a request without a generation may ask it


def _listed(self: SignedApplication, *arguments: Any, **named: Any) -> None:
    _make(self, *arguments, **named)
    _found.update({path: path in self.generationless_paths for path in self.paths})
    (Path(sys.argv[1]) / "paths.json").write_text(json.dumps(_found))


if __name__ == "__main__":
    SignedApplication.__init__ = _listed  # type: ignore[method-assign]
    sys.exit(drive.main())
