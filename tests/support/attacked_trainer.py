"""A trainer that tells what can be asked of it: `python -m tests.support.attacked_trainer FOLDER
...`.

As `tests.support.toy_trainer`; the paths of its guarded listeners stand in `paths.json` of the
folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from holdfast.wire.http.server import Guard
from tests.support import toy_trainer as drive

_make = Guard.__init__
_found: dict[str, bool] = {}  # path -> whether it may be asked from outside any generation


def _listed(self: Guard, *arguments: Any, **named: Any) -> None:
    _make(self, *arguments, **named)
    _found.update({path: path in self.outside for path in self.paths})
    (Path(sys.argv[1]) / "paths.json").write_text(json.dumps(_found))


if __name__ == "__main__":
    Guard.__init__ = _listed  # type: ignore[method-assign]
    sys.exit(drive.main())
