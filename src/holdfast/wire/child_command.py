"""The command of a child process that runs one of our modules.

A child does not look for modules in the current folder (`-P`). Otherwise a user's `random.py` there
would be run in place of Python's own. PYTHONPATH counts, as the user has set it.
"""

from __future__ import annotations

import sys


def module_command(module: str, *arguments: str, python: str = "") -> list[str]:
    """Return the command that runs `module` in this environment's Python, or in another one."""
    return [python or sys.executable, "-P", "-m", module, *arguments]


def paths_for(module: str) -> list[str]:
    """Return the folders in which a child may find a module that is not ours, as this process does.

    The child looks there last, so that nothing in them takes the place of an installed module.
    """
    if module.split(".", 1)[0] == __name__.split(".", 1)[0]:
        return []
    return [path for path in sys.path if path]
