"""`holdfast chat`: a conversation with a trained model, in the terminal."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import (
    CheckpointStep,
    LoraBase,
    RunArgument,
    Temperature,
    TopP,
    refuse_beside,
)
from holdfast.config.huggingface.folder import describe_unread_settings
from holdfast.core.seeds import key_seed
from holdfast.errors import UserError
from holdfast.export.texts import Sampling, TextModel, is_model_folder, open_texts
from holdfast.show.output import say

app = make_app("Talk with a trained run in the terminal.")

COMMANDS = {
    "/reset": "begin a new conversation",
    "/system TEXT": "set the system message and begin a new conversation; no TEXT: none",
    "/seed N": "set the seed and begin a new conversation",
    "/help": "print this list",
    "//TEXT": "say /TEXT to the model",
}


@app.command()
def chat(
    run: RunArgument,
    system: Annotated[str, typer.Option(help="system message; none if left out")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="most tokens of a reply")] = 512,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    seed: Annotated[int, typer.Option(help="the same seed gives the same replies")] = 0,
    step: CheckpointStep = None,
    base: LoraBase = None,
) -> None:
    """Talk with the newest intact checkpoint of a run that was trained on chat data.

    In the place of the run, the folder of a model in Hugging Face form gives weights, template and
    end tokens. Ctrl-C ends a reply, Ctrl-D ends the chat, and /help lists what else there is. From
    a pipe, all of standard input is one message, and its reply is all that is printed.

    \b
    Example:
      holdfast chat runs/tuned
      holdfast chat exported-model --system "Answer in one word." --temperature 0
      echo "Which colour is the sky?" | holdfast chat runs/tuned --seed 7
    """
    how = Sampling(tokens, temperature, top_p, seed)
    how.refuse()
    if is_model_folder(run):
        refuse_beside("the folder of a model", {"--step": step is not None, "--base": base})
    is_terminal = sys.stdin.isatty()
    message = "" if is_terminal else _read_message(run)
    opened = open_texts(run, step, base, say)
    opened.texts.require_template()
    if unread := describe_unread_settings(opened.settings):
        say(unread)
    say(f"({opened.source})")
    conversation = Conversation(opened.texts, how, system)
    if is_terminal:
        say("Ctrl-C ends a reply, Ctrl-D ends the chat, /help lists the commands")
        _talk(conversation)
    else:
        conversation.answer(message)


class Conversation:
    """The messages so far. Each reply has a seed of its own; the first one has that of `how`."""

    def __init__(self, texts: TextModel, how: Sampling, system: str):
        self._texts, self._how, self._system = texts, how, system
        self._messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation."""
        self._messages = [{"role": "system", "content": self._system}] if self._system else []
        self._replies = 0

    def obey(self, line: str) -> None:
        """Do what a line such as `/reset` says. Raises UserError for one that is no command."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/help" and not rest:
            print("\n".join(f"{command:<14}{text}" for command, text in COMMANDS.items()))
            return
        if name == "/seed" and rest.removeprefix("-").isdecimal():
            self._how = replace(self._how, seed=int(rest))
        elif name == "/system":
            self._system = rest
        elif name != "/reset" or rest:
            raise UserError(
                f"{line!r} is no command of the chat", remedy=f"use one of {', '.join(COMMANDS)}"
            )
        self.reset()
        print("(a new conversation)", flush=True)

    def answer(self, message: str) -> None:
        """Print the reply to a message. KeyboardInterrupt ends it, and its part is kept. Raises
        UserError if there can be none; the conversation is then as it was."""
        asked = [*self._messages, {"role": "user", "content": message}]
        seed = self._how.seed
        if self._replies:
            seed = key_seed(seed, "chat", self._replies)
        said: list[str] = []

        def take(piece: str) -> None:
            said.append(piece)
            print(piece, end="", flush=True)

        try:
            self._texts.reply(asked, replace(self._how, seed=seed), take, shorten=True)
        except KeyboardInterrupt:
            self._keep(asked, said)
            raise
        self._keep(asked, said)

    def _keep(self, asked: list[dict[str, str]], said: list[str]) -> None:
        print(flush=True)
        self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        self._replies += 1


def _talk(conversation: Conversation) -> None:
    """Read lines until Ctrl-D. A line that cannot be answered does not end the chat."""
    with suppress(ImportError):
        import readline  # noqa: F401  # lines can be edited, and come back
    while True:
        try:
            line = input("you> ").strip()
        except EOFError:
            print(flush=True)
            return
        except KeyboardInterrupt:
            print(flush=True)
            say("Ctrl-D ends the chat")
            continue
        try:  # Ctrl-C ends a reply
            if line.startswith("/") and not line.startswith("//"):
                conversation.obey(line)
            elif line:
                conversation.answer(line.removeprefix("/") if line.startswith("//") else line)
        except KeyboardInterrupt:
            continue
        except UserError as error:
            say(str(error))


def _read_message(run: Path) -> str:
    """All of standard input. Raises UserError for an empty one."""
    message = sys.stdin.read().strip()
    if not message:
        command = f"holdfast chat {shlex.quote(str(run))}"
        raise UserError(
            "there is no message on standard input",
            remedy=f'write one: echo "Which colour is the sky?" | {command}',
        )
    return message
