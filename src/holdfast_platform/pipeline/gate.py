"""The command of a stage of kind gate: a model enters a registry and is promoted.

    python -m holdfast_platform.pipeline.gate REGISTRY MODEL RULES REPORT

`holdfast registry add` and `promote` in one. Called again, it finds the version that an earlier
start has added.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from holdfast.errors import UserError
from holdfast.show.output import say
from holdfast.wire.store.publish import replace_file
from holdfast_platform.commands.registry import open_registry
from holdfast_platform.pipeline.digests import Digests
from holdfast_platform.registry.gate import Gate, read_rules


def main() -> int:
    place, model, rules, report = sys.argv[1:]
    try:
        registry, digests = open_registry(place, may_be_new=True), Digests(None)
        state = registry.state()
        files = {path.name: digests.of_path(path) for path in Path(model).iterdir()}
        version = next(
            (
                number
                for number, entry in state.versions.items()
                if {name: file.get("sha256") for name, file in entry["files"].items()} == files
            ),
            None,
        )
        if version is None:
            version = registry.add(Path(model), {"folder": model})
        if state.current != version:
            Gate(registry, read_rules(Path(rules)), say).promote(str(version))
        say(f"version {version} of {place} is promoted")
        # No version: its number depends on what the registry had before.
        found = {"promoted": files, "rules": digests.of_path(Path(rules))}
        replace_file(Path(report), json.dumps(found, indent=1, sort_keys=True) + "\n")
    except UserError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
