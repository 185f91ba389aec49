"""`holdfast`: finds the command, calls it, and turns an error into a sentence.

The commands stand in a table of names. A command's module is imported when it is called, and the
general help is printed from the table alone. So `holdfast --help` costs no more than the
interpreter's own start.

Exit code 0: done. 1: a fault of ours or of the machine (the traceback goes into a log file). 2: an
error that the user can mend, in one sentence. 3: a run that cannot continue as it is (too few
nodes, no state that can be trusted). 130: after Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from holdfast.cli.streams import guard_streams
from holdfast.wire.process_end import skip_last_collection

# name -> (module, what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("init", "write a run file to start from"),
    "train": ("train", "start or resume the run that a run file describes"),
    "run": ("run", "start or resume a run whose loop is your own script"),
    "join": ("join", "take part in a run on several machines"),
    "launch": ("launch", "start a run on machines of Slurm, Ray, Kubernetes or a host file"),
    "host": ("host", "run programs of a controller on this machine"),
    "status": ("status", "show the nodes of a launched run"),
    "logs": ("logs", "print what the nodes of a launched run have printed"),
    "down": ("down", "give the machines of a launched run back"),
    "broker": ("broker", "launch runs for a platform with the Open Service Broker API"),
    "cloud": ("cloud", "show prices, choose a mix, write jobs for managed services"),
    "cluster": ("cluster", "bring up a Ray or Slurm of your own on this machine"),
    "branch": ("branch", "begin a new run from a checkpoint of another one"),
    "watch": ("watch", "follow a run from another terminal"),
    "track": ("track", "bring a run to W&B, MLflow, TensorBoard or CSV files"),
    "notice": ("notice", "tell a run that machines are about to go"),
    "report": ("report", "write one HTML page about a run"),
    "generate": ("generate", "sample text from a trained run"),
    "export": ("export", "write a folder that transformers or DCP loads"),
    "data": ("data", "prepare, inspect, verify and audit the training data"),
    "checkpoint": ("checkpoint", "list, show, verify, compare, copy, prune and import checkpoints"),
    "config": ("config", "show a run file with every value's origin; its schema"),
    "trace": ("trace", "read, show and make traces of machines that come and go"),
    "simulate": ("simulate", "simulate a run on machines that come and go"),
    "score": ("score", "score how well a trainer or a policy survives losses"),
    "predict": ("predict", "fit a predictor of lost nodes to traces, and judge it"),
    "scale": ("scale", "show how a run scales from 8 to 16,384 devices"),
    "plan": ("plan", "show which layout a run would get, and what that costs"),
    "claims": ("claims", "show claims of surveys next to what was measured here"),
    "layout": ("layout", "show how a model is spread, and a pipeline's schedule"),
    "stage": ("stage", "keep other machines' snapshots in this machine's memory"),
    "calibrate": ("calibrate", "measure this machine's devices and links, for the planner"),
    "chaos": ("chaos", "break a run on purpose, and see that it comes to the same end"),
    "doctor": ("doctor", "check that this machine can train"),
    "completion": ("completion", "print a script for the Tab key of a shell"),
}
COMPLETION_VARIABLE = "_HOLDFAST_COMPLETE"  # set by that script when Tab is pressed

_HELP = """\
Usage: holdfast COMMAND [ARGUMENTS]

Holdfast trains language models on machines that keep disappearing.

Commands:
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
        skip_last_collection()
        guard_streams(arguments)
    if argv is None and COMPLETION_VARIABLE in os.environ:
        from holdfast.cli.completion import answer_shell

        answer_shell(os.environ)
    try:
        return _dispatch(arguments)
    except BrokenPipeError:
        # End quietly, as SIGPIPE would: the reader of our output has exited (`| head`).
        return 141
    except OSError as error:  # of the help: a command's own errors have been answered
        print(f"holdfast: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        if len(arguments) > 1 and arguments[1] in COMMANDS:
            return _dispatch([arguments[1], "--help"])
        width = max(map(len, COMMANDS))
        lines = (f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
        print(_HELP.format(commands="\n".join(lines)), end="", flush=True)
        return 0 if arguments else 2
    if arguments[0] in ("--version", "-V"):
        from importlib.metadata import version

        print(f"holdfast {version('holdfast')}", flush=True)
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        from holdfast.errors import nearest_of

        close = nearest_of(name, COMMANDS)
        remedy = f"did you mean 'holdfast {close}'?" if close else "see 'holdfast --help'"
        print(f"holdfast: there is no command {name!r}; {remedy}", file=sys.stderr)
        return 2
    from holdfast.cli.dispatch import call

    return call(f"holdfast.cli.{COMMANDS[name][0]}", f"holdfast {name}", arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
