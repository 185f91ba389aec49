"""The commands of `holdfast`, with the module of each and its group in the help.

The runtime's commands stand here. An installed package adds its own with an entry point of the
group `holdfast.commands`, whose value is a tuple of `Command`. No command's module is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

ENTRY_POINTS = "holdfast.commands"
START = "First steps"
GROUPS = (START, "Look", "Data and models", "Machines", "Lab", "Platform")
"""In the order of the general help."""


@dataclass(frozen=True)
class Command:
    name: str  # as the user types it
    module: str  # has the Typer application `app`
    group: str  # one of GROUPS, or a command that this one is a part of
    help: str  # what it does, in one line


def commands_of(package: str, group: str, **helps: str) -> tuple[Command, ...]:
    """Return commands whose modules have their names. package: of these modules."""
    return tuple(Command(name, f"{package}.{name}", group, text) for name, text in helps.items())


_ROOM = "holdfast.cli"
RUNTIME_COMMANDS = (
    *commands_of(
        _ROOM,
        START,
        init="write a run file to start from",
        doctor="check that this machine can train",
        plan="show which layout a run would get, and what that costs",
        train="start or resume the run that a run file describes",
        watch="follow a run from another terminal",
        report="write one HTML page about a run",
        generate="sample text from a trained run",
        chat="talk with a trained run in the terminal",
        evaluate="score a run or a model on tasks",
        export="write a folder that transformers or DCP loads",
    ),
    *commands_of(
        _ROOM,
        "Look",
        config="show a run file with every value's origin; its schema",
        layout="show how a model is spread, and a pipeline's schedule",
        dashboard="show runs in a browser while they train",
        status="show the nodes of a run, and how far it is",
        explain="say what went wrong in a run, and what shows it",
        profile="record what a running job does in its next steps",
        logs="print what the nodes of a launched run have printed",
        track="bring a run to W&B, MLflow, TensorBoard or CSV files",
    ),
    *commands_of(
        _ROOM,
        "Data and models",
        data="prepare, inspect, verify and audit the training data",
        checkpoint="list, show, verify, compare, copy, prune and import checkpoints",
        prune="write a model with fewer weights or blocks",
        stitch="put models that were trained apart together into one",
        branch="begin a new run from a checkpoint of another one",
        run="start or resume a run whose loop is your own script",
    ),
    *commands_of(
        _ROOM,
        "Machines",
        launch="start a run on machines of Slurm, Ray, Kubernetes or a host file",
        join="take part in a run on several machines",
        actor="generate completions for a run that is at work elsewhere",
        down="give the machines of a launched run back",
        notice="tell a run that machines are about to go",
        stage="keep other machines' snapshots in this machine's memory",
        calibrate="measure this machine's devices and links, for the planner",
        completion="print a script for the Tab key of a shell",
    ),
)


def runtime_command(name: str) -> Command | None:
    """Return a command of the runtime. This asks for no other package, so it costs nothing."""
    return next((command for command in RUNTIME_COMMANDS if command.name == name), None)


@cache
def all_commands() -> dict[str, Command]:
    """Return the commands of all installed packages by name, in the order of the help."""
    commands = [command for command in _every_command() if command.group in GROUPS]
    commands.sort(key=lambda command: GROUPS.index(command.group))
    return {command.name: command for command in commands}


def parts_of(name: str) -> list[Command]:
    """Return what other packages add to a command of several parts. The function `module` has for
    a part has its name, with underscores."""
    return [command for command in _every_command() if command.group == name]


@cache
def _every_command() -> tuple[Command, ...]:
    from importlib.metadata import entry_points

    commands = list(RUNTIME_COMMANDS)
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        try:
            commands += point.load()
        except ModuleNotFoundError as error:
            if error.name != point.module.partition(".")[0]:
                raise
            continue  # this package was removed after the installation
    return tuple(commands)
