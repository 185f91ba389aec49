"""Ends a benchmark at Ctrl-C with one sentence and exit code 130, without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable


def run_main(main: Callable[[], int | None]) -> None:
    """Call `main`. What it has printed stays; nothing else is kept."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted; the lines above are complete", file=sys.stderr)
        sys.exit(130)
