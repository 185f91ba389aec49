"""The root of the command line: help, unknown commands, and how errors come out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.api.early_end import crash_log_in
from holdfast.cli.dispatch import app
from holdfast.cli.main import main
from holdfast.cli.table import Command, all_commands
from holdfast.errors import CorruptError, DataError
from tests.support.commands import start, within

# Modules that the help of the whole must not need: each costs a good part of its 0.4 s.
HEAVY = ("torch", "numpy", "pydantic", "typer", "rich", "yaml", "httptools", "tokenizers")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from holdfast.cli.main import main; code = main(['--help']);"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), code, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr.strip() == "[] 0"
    for name in all_commands():
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("name", all_commands())
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    found = within(name, "--help")
    assert found.code == 0
    assert "..." not in found.out.partition("Commands:")[2], "a short help that is cut off"
    listed = found.out.partition("Commands:\n")[2].splitlines()
    for words in [line.split()[:1] for line in listed] or [[]]:
        shown = within(name, *words, "--help")
        assert "Example:\n" in shown.out
        assert f"  holdfast {' '.join([name, *words])}" in shown.out


def test_help_of_one_command_two_ways() -> None:
    assert within("help", "train") == within("train", "--help")


def test_without_a_command_the_help_is_shown() -> None:
    found = within()
    assert found.code == 2
    assert "Usage: holdfast COMMAND" in found.out


def test_version() -> None:
    from importlib.metadata import version

    assert within("--version").out == f"holdfast {version('holdfast')}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "there is no command 'trian'; did you mean 'holdfast train'?"),
        (["xyzzy"], "there is no command 'xyzzy'; see 'holdfast --help'"),
        (["train"], "Missing"),
        (["train", "run.yaml", "--frsh"], "--frsh"),
        (["train", "run.yaml", "--train.steps=5"], "write train.steps=VALUE"),
        (["prune", "run.yaml", "--to", "y"], "magnitude, wanda, layers; see"),
        (["data"], "see 'holdfast data --help'"),
        (["data", "prepar"], "prepar"),
        (["generate", "run", "x", "--tokens", "many"], "--tokens"),
        (["generate", "run", "x", "--tokens", "0"], "greater than or equal to 1"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: list[str], words: str) -> None:
    within(*arguments).refuses(words)


def test_a_reader_that_leaves_is_no_error() -> None:
    process = start("config", "schema")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    assert (process.wait(timeout=120), said) == (141, "")


# --- errors ---------------------------------------------------------------------------------
COMMAND = "faulty"


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Registers a command that raises what the test wants; stands in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def register(error: BaseException, folder: Path | None = None) -> None:
        application = app("Raises.")

        @application.command()
        def raises() -> None:
            if folder is None:
                raise error
            with crash_log_in(folder):
                raise error

        module = type(sys)("holdfast.cli.faulty")
        module.app = application  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "holdfast.cli.faulty", module)
        monkeypatch.setitem(
            all_commands(), COMMAND, Command(COMMAND, "holdfast.cli.faulty", "Look", "raises")
        )

    return register


def test_a_users_mistake_is_a_sentence(faulty, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    faulty(DataError("nothing is left", where="data.sources", remedy="give it text"))
    found = within(COMMAND)
    assert (found.code, found.err) == (2, "holdfast: data.sources: nothing is left; give it text\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError("broken\nhere"), CorruptError("blob x is torn")])
def test_our_own_fault_is_a_sentence_and_a_log(error, faulty, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    faulty(error)
    found = within(COMMAND)
    assert found.code == 1
    assert found.err.count("\n") == 1
    (log,) = tmp_path.glob("holdfast-error-*.log")
    assert log.name in found.err
    assert "Traceback" in log.read_text()
    assert str(error).split("\n")[0] in found.err


def test_a_fault_after_strange_arguments_is_logged_too(faulty, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    faulty(RuntimeError("broken"))
    monkeypatch.setattr(sys, "argv", ["holdfast", "caf\udce9"])
    assert within(COMMAND).err.count("\n") == 1
    (log,) = tmp_path.glob("holdfast-error-*.log")
    assert "caf\\udce9" in log.read_text()


def test_a_fault_in_a_run_is_logged_in_its_folder(faulty, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    faulty(KeyError("x"), run)
    found = within(COMMAND)
    assert found.code == 1
    (log,) = (run / "logs").iterdir()
    assert str(log) in found.err


def test_interrupted_while_modules_are_imported_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cli.main._dispatch", interrupted)
    assert main(["train"]) == 130


def test_interrupted_is_130(faulty) -> None:  # type: ignore[no-untyped-def]
    faulty(KeyboardInterrupt())
    found = within(COMMAND)
    assert (found.code, found.err) == (130, "holdfast faulty: interrupted\n")


@pytest.mark.parametrize(("number", "words"), [(28, "the disk is full"), (13, "no permission")])
def test_what_the_machine_refuses_is_a_sentence(number, words, faulty) -> None:  # type: ignore[no-untyped-def]
    faulty(OSError(number, os.strerror(number), "/some/file"))
    within(COMMAND).refuses("/some/file", words)


# --- the scripts of `holdfast completion`, loaded by real shells ----------------------------------
SHELLS = ("bash", "zsh", "fish")
CASES = [
    ("holdfast checkp", {"checkpoint"}),
    ("holdfast checkpoint pr", {"prune"}),
    ("holdfast train --fr", {"--fresh"}),
    ("holdfast checkpoint diff --", {"--json", "--brief", "--help"}),
    ("holdfast no-such-command --", {"--help"}),
]
BASH = """
eval "$(holdfast completion bash)"
COMP_WORDS=({line}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
"$(complete -p holdfast | sed 's/.*-F \\([^ ]*\\) .*/\\1/')" holdfast
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
compdef() {{ }}; _arguments() {{ print -r -- "$@" }}
eval "$(holdfast completion zsh)"
words=({line}) CURRENT=${{#words}}
_holdfast_completion
"""
FISH = "holdfast completion fish | source; complete --do-complete '{line}'"


def offered(shell: str, script: str, home: Path) -> set[str]:
    """Run a script in a shell without settings; return the first word of each line."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    plain = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run(
        [program, *plain, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ
        | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr
    return {line.split("\t")[0] for line in done.stdout.splitlines() if line}


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_bash_completes_commands_and_options(line: str, expected: set[str], tmp_path: Path) -> None:
    assert offered("bash", BASH.format(line=line), tmp_path) == expected


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_fish_completes_commands_and_options(line: str, expected: set[str], tmp_path: Path) -> None:
    assert offered("fish", FISH.format(line=line), tmp_path) == expected


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_zsh_completes_commands_and_options(line: str, expected: set[str], tmp_path: Path) -> None:
    """The terminal's part of zsh is replaced: what the script hands to it is printed."""
    said = offered("zsh", ZSH.format(line=line), tmp_path)
    assert set(re.findall(r'(?:^|[( ])"([^"]+)"', "\n".join(said), re.MULTILINE)) == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str) -> None:
    found = within("completion", shell)
    assert found.code == 0
    assert "_HOLDFAST_COMPLETE=complete_" + shell in found.out


def test_another_shell_is_refused() -> None:
    within("completion", "csh").refuses("csh", "bash")
