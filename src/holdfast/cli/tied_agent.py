"""`holdfast` as a process that ends with its starter, however that ended.

    python -m holdfast.cli.tied_agent FD join LOCATION --node NAME ...

FD is the inherited read end of the starter's lifeline (`wire/lifeline.py`). An owner of machines
that starts a lost agent again elsewhere needs this. If the starter is lost, no second agent of the
same node may stay behind.
"""

from __future__ import annotations

import sys

from holdfast.wire.lifeline import watch_lifeline


def main() -> int:
    watch_lifeline(int(sys.argv.pop(1)))
    sys.argv[0] = "holdfast"  # this process is the command, as its title shows
    from holdfast.cli.main import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
