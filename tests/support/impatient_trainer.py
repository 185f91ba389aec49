"""A trainer that waits 3 s for a lost run folder: `python -m tests.support.impatient_trainer FOLDER
...`.

As `tests.support.toy_trainer`, which waits for minutes.
"""

from __future__ import annotations

import sys

from holdfast.elastic.agent import run_folder_monitor
from tests.support.toy_trainer import main

if __name__ == "__main__":
    run_folder_monitor.FOLDER_RETURN_TIMEOUT_S = 3.0
    sys.exit(main())
