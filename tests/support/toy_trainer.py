"""A trainer for tests: `python -m tests.support.toy_trainer FOLDER [key=value ...]`.

Prints what the agent says, and ends with "exit <code>".
"""

from __future__ import annotations

import sys

from holdfast.config.loading.load import load_config
from holdfast.errors import UserError
from holdfast.launch import local
from holdfast.wire.process_end import skip_collections


def main() -> int:
    skip_collections()
    folder, *overrides = sys.argv[1:]
    loaded = load_config(None, [f"folder={folder}", "device=cpu", *overrides])
    try:
        return local.train_locally(
            loaded,
            say=lambda line: print(line, flush=True),
            render_metrics=lambda: b"holdfast_toy 1\n",
            dataset_version="toy",
            entry="tests.support.toy_workers:train",
        )
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
