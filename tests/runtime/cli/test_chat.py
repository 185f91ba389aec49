"""`holdfast chat` from a pipe and in a terminal."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
import time
from pathlib import Path

import pytest

from holdfast.core.seeds import key_seed
from holdfast.export.texts import Sampling, open_folder
from holdfast.model.huggingface import export_folder
from tests.runtime.cli.conftest import Trained
from tests.support.chat import tokenizer_folder
from tests.support.commands import here
from tests.support.models import config, lively


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first 4000 likeliest tokens are no end token."""
    root = tmp_path_factory.mktemp("chat")
    tokens = tokenizer_folder(root / "tokenizer") / "tokenizer.json"
    model = config(vocab_size=400, max_position=4096)
    export_folder(root / "model", model, lively(model).state_dict(), tokens, end_token="<|im_end|>")
    settings = (root / "tokenizer" / "tokenizer_config.json").read_text()
    (root / "model" / "tokenizer_config.json").write_text(settings)
    return root / "model"


def from_pipe(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_pipe_has_one_reply_which_is_that_of_generate(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--tokens", "30", "--seed", "3", "--temperature", "1.5")
    wanted = here(capsys, "generate", folder, "Say\nred.", "--chat", *options).succeeds()
    from_pipe("Say\nred.\n", monkeypatch)
    assert here(capsys, "chat", folder, *options).succeeds().out == wanted.out
    from_pipe(" \n", monkeypatch)
    here(capsys, "chat", folder).refuses("no message on standard input")
    from_pipe("Say red.", monkeypatch)
    here(capsys, "chat", folder, "--step", "3").refuses("--step has no effect")
    from_pipe("red " * 5000, monkeypatch)
    here(capsys, "chat", folder).refuses_last("the model 4096 positions")


def test_a_run_without_a_template_is_refused(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from_pipe("Say red.", monkeypatch)
    here(capsys, "chat", trained.folder).refuses("not trained on chat data", "leave out --chat")


class Terminal:
    """`holdfast` at a terminal of its own."""

    def __init__(self, *arguments: str):
        command = [sys.executable, "-m", "holdfast", *arguments]
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(command[0], command, {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"})

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def read_until(self, text: str, again: str = "") -> str:
        """Return what appears up to `text`, with the ends of lines that programs write. again: is
        typed after each second of silence."""
        seen, end = b"", time.monotonic() + 200
        while not seen.endswith(text.encode()):
            assert time.monotonic() < end, seen
            if select.select([self._fd], [], [], 1)[0]:
                seen += os.read(self._fd, 1)
            elif again:
                self.type(again)
        return seen.decode().replace("\r\n", "\n").removesuffix(text)

    def ends(self) -> int:
        """Wait for the end and return the exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_a_terminal_streams_and_obeys(folder: Path) -> None:
    texts = open_folder(folder)

    def reply(seed: int, *said: str) -> str:
        roles = ("user", "assistant", "user") if len(said) % 2 else ("system", "user")
        messages = [{"role": roles[i], "content": text} for i, text in enumerate(said)]
        return texts.reply(messages, Sampling(12, 0.7, 0.9, seed))

    options = ("--tokens", "12", "--temperature", "0.7", "--top-p", "0.9", "--seed", "5")
    terminal = Terminal("chat", str(folder), *options)
    assert "Ctrl-D ends the chat" in terminal.read_until("you> ")

    def say(line: str) -> str:
        terminal.type(f"{line}\n")
        return terminal.read_until("\nyou> ").removeprefix(f"{line}\n")

    first = say("Say red.")
    assert first == reply(5, "Say red.")
    second = say("//Say blue.")
    assert second == reply(key_seed(5, "chat", 1), "Say red.", first, "/Say blue.")
    assert "(a new conversation)" in say("/reset")
    assert say("Say red.") == first
    assert "(a new conversation)" in say("/system Be brief.")
    assert say("Say red.") == reply(5, "Be brief.", "Say red.")
    assert "(a new conversation)" in say("/seed 6")
    assert say("Say red.") == reply(6, "Be brief.", "Say red.")
    assert "use one of /reset, /system" in say("/unknown")
    assert "begin a new conversation" in say("/help")
    terminal.type("\x04")
    assert terminal.ends() == 0


def test_ctrl_c_ends_a_reply_and_the_chat_goes_on(folder: Path) -> None:
    terminal = Terminal("chat", str(folder), "--tokens", "4000", "--temperature", "0")
    terminal.read_until("you> ")
    terminal.type("Say red.\n")
    terminal.read_until("Say red.\r\n")
    terminal.read_until(" ")
    terminal.type("\x03")
    terminal.read_until("\nyou> ")
    # A signal between readline's prompt and its wait for a key counts at the next key.
    terminal.read_until("Ctrl-D ends the chat\r\nyou> ", again="\x03")
    terminal.type("\x04")
    assert terminal.ends() == 0
