"""`holdfast completion`: what a shell offers when Tab is pressed.

The shell's script calls `holdfast` with the line so far in the environment, and Typer answers. Only
the module of the command on the line is imported, so that an answer comes quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from importlib import import_module
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.main import COMPLETION_VARIABLE
from holdfast.cli.table import all_commands


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


app = make_app("Print a script that makes a shell complete commands and options.")


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(help="the shell")]) -> None:
    """Print the script that a shell loads to complete commands, options and files.

    \b
    Example:
      holdfast completion bash > ~/.local/share/bash-completion/completions/holdfast
      holdfast completion zsh > ~/.zfunc/_holdfast
      holdfast completion fish > ~/.config/fish/completions/holdfast.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    print(
        get_completion_script(
            prog_name="holdfast", complete_var=COMPLETION_VARIABLE, shell=shell.value
        )
    )


def answer_shell(environment: Mapping[str, str]) -> None:
    """Print what fits the line so far, and end the process as Typer does."""
    line = environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS", "")
    typed = line.split()[1:2]
    root = typer.Typer(add_completion=True, rich_markup_mode=None)
    for name, command in all_commands().items():
        if [name] != typed:
            root.command(name, help=command.help)(_nothing)
            continue
        typed_app = import_module(command.module).app
        if len(typed_app.registered_commands) == 1 and typed_app.registered_callback is None:
            callback = typed_app.registered_commands[0].callback
            assert callback is not None
            root.command(name, help=command.help)(callback)
        else:
            root.add_typer(typed_app, name=name, help=command.help)
    entry = typer.main.get_command(root)
    entry.params = []  # Typer's own options, which `holdfast` does not have
    entry.main(prog_name="holdfast", complete_var=COMPLETION_VARIABLE)


def _nothing() -> None:
    """Stand for a command that is not on the line."""
