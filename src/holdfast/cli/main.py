"""`holdfast`: finds the command, calls it, and turns an error into a sentence.

The commands stand in a table of names (`cli/table.py`). A command's module is imported when it is
called, and the general help is printed from the table alone. So `holdfast --help` costs little more
than the interpreter's own start.

Exit code 0: done. 1: a fault of ours or of the machine (the traceback goes into a log file). 2: an
error that the user can mend, in one sentence. 3: a run that cannot continue as it is (too few
nodes, no state that can be trusted). 4: over budget. 130: after Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from holdfast.cli.streams import guard_streams
from holdfast.cli.table import GROUPS, all_commands, runtime_command
from holdfast.wire.process_end import skip_collections

COMPLETION_VARIABLE = "_HOLDFAST_COMPLETE"  # set by that script when Tab is pressed

_HELP = """\
Usage: holdfast COMMAND [ARGUMENTS]

Holdfast trains language models on machines that keep disappearing.

{commands}

Start with:
  holdfast init              writes run.yaml
  holdfast train run.yaml    trains it; the same command again resumes it

'holdfast COMMAND --help' explains one command. 'holdfast --version' prints the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # a process of our own
        skip_collections()
        guard_streams(arguments)
    if argv is None and COMPLETION_VARIABLE in os.environ:
        from holdfast.cli.completion import answer_shell

        answer_shell(os.environ)
    try:
        return _dispatch(arguments)
    except BrokenPipeError:
        # End quietly, as SIGPIPE would: the reader of our output has exited (`| head`).
        return 141
    except KeyboardInterrupt:  # while modules are imported
        print("holdfast: interrupted", file=sys.stderr)
        return 130
    except OSError as error:  # of the help: a command's own errors have been answered
        print(f"holdfast: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        if len(arguments) > 1 and arguments[1] in all_commands():
            return _dispatch([arguments[1], "--help"])
        commands = all_commands()
        width = max(map(len, commands))
        parts = []
        for group in GROUPS:
            members = [command for command in commands.values() if command.group == group]
            if members:
                lines = (f"  {command.name:<{width}}  {command.help}" for command in members)
                parts.append("\n".join((f"{group}:", *lines)))
        print(_HELP.format(commands="\n\n".join(parts)), end="", flush=True)
        return 0 if arguments else 2
    if arguments[0] in ("--version", "-V"):
        from importlib.metadata import version

        print(f"holdfast {version('holdfast')}", flush=True)
        return 0
    name = arguments[0]
    command = runtime_command(name) or all_commands().get(name)
    if command is None:
        from holdfast.errors import nearest_of

        close = nearest_of(name, all_commands())
        remedy = f"did you mean 'holdfast {close}'?" if close else "see 'holdfast --help'"
        print(f"holdfast: there is no command {name!r}; {remedy}", file=sys.stderr)
        return 2
    from holdfast.cli.dispatch import call

    return call(command.module, f"holdfast {name}", arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
