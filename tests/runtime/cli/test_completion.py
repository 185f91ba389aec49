"""The scripts of `holdfast completion`, loaded by real shells."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import here

SHELLS = ("bash", "zsh", "fish")
CASES = [
    ("holdfast checkp", {"checkpoint"}),
    ("holdfast checkpoint pr", {"prune"}),
    ("holdfast train --fr", {"--fresh"}),
    ("holdfast checkpoint diff --", {"--json", "--help"}),
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
def test_every_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = here(capsys, "completion", shell)
    assert found.code == 0
    assert "_HOLDFAST_COMPLETE=complete_" + shell in found.out


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    here(capsys, "completion", "csh").refuses("csh", "bash")
