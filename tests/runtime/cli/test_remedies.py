"""The remedies of messages about a command line, carried out until the command succeeds."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

import pytest

from tests.runtime.cli.conftest import Trained
from tests.runtime.cli.remedies import of_lab, of_models, of_platform, of_runs
from tests.runtime.cli.remedies.lab import Case, Lab, carry_out
from tests.support.commands import within, write_run_file

MOST_ROUNDS = 4
Change = Callable[[list[str], str, re.Match[str]], list[str]]


def place_of(arguments: list[str], message: str) -> int:
    """Return the place of the option's value, the override or the word that the message names."""
    if option := re.search(r"(?:: |')(--[a-z-]+)", message):
        return arguments.index(option[1]) + 1
    if override := re.search(r"command line: ([^:]+=[^:]*): ", message):
        if override[1] in arguments:
            return arguments.index(override[1])
        key = override[1].partition("=")[0]
        return arguments.index(f"--{key.rpartition('.')[2]}") + 1
    if step := re.search(r"step (\d+)", message):
        return next(i for i, word in enumerate(arguments) if word.endswith(step[1]))
    quoted = re.search(r"'([^']*)'", message)
    return next(i for i, word in enumerate(arguments) if quoted and quoted[1] in word)


def use_value(arguments: list[str], message: str, found: re.Match[str]) -> list[str]:
    place = place_of(arguments, message)
    before = re.match(r".*[=@]|", arguments[place])
    value = found[1].strip("',")
    changed = (before[0] if before else "") + value
    return [*arguments[:place], changed, *arguments[place + 1 :]]


def use_option(arguments: list[str], message: str, found: re.Match[str]) -> list[str]:
    place = arguments.index(found[1]) + 1
    return [*arguments[:place], found[2], *arguments[place + 1 :]]


def use_setting(arguments: list[str], message: str, found: re.Match[str]) -> list[str]:
    place = arguments.index(f"--{found[1]}") + 1
    return [*arguments[:place], found[2], *arguments[place + 1 :]]


def use_schedule(arguments: list[str], message: str, found: re.Match[str]) -> list[str]:
    place = arguments.index("--schedule") if "--schedule" in arguments else len(arguments)
    return [*arguments[:place], "--schedule", found[1], *arguments[place + 2 :]]


def use_word(arguments: list[str], message: str, found: re.Match[str]) -> list[str]:
    wrong = re.search(r"(?:unknown key |')([\w.-]+)", message)
    assert wrong is not None
    return [word.replace(wrong[1], found[1]) for word in arguments]


def use_listed_option(arguments: list[str], message: str, found: re.Match[str]) -> list[str]:
    wrong = message.partition("No such option: ")[2].split()[0]
    (meant,) = get_close_matches(wrong, found[1].split(", "), n=1)
    return [meant if word == wrong else word for word in arguments]


def run_instead(arguments: list[str], message: str, found: re.Match[str]) -> list[str]:
    return shlex.split(found[1])[1:]


RUN_FIRST = re.compile(r"(?:first|make one|make it): (holdfast .+|mkdir -p .+)$")
RULES: list[tuple[str, Change]] = [
    (r"[Dd]id you mean '?(?:holdfast )?([\w.-]+)'?\?", use_word),
    (r"Possible options: ([^)]+)\)", use_listed_option),
    (r"choose another name: (holdfast .+)$", run_instead),
    (r"use (--[a-z-]+) (\S+)", use_option),
    (r"use the schedule (\w+)", use_schedule),
    (r"write for example --\S+ (\S+)$", use_value),
    (r"one of these: (\S+)", use_value),
    (r"there are: (\S+)", use_value),
    (r"is not one of ('\w+')", use_value),
    (r"use a (temperature) of at least (\d+)", use_setting),
    (r"greater than or equal to (\d+)", use_value),
    (r"(?:use|write|give)(?: one of| ranks)? (\S+)", use_value),
]


def follow_messages(arguments: list[str]) -> list[str]:
    """Do what the message says, until the command succeeds. Return the messages."""
    told: list[str] = []
    for _ in range(MOST_ROUNDS):
        outcome = within(*arguments)
        if outcome.code == 0:
            return told
        assert outcome.code == 2, outcome.err
        message = outcome.err.strip().split("\n")[-1]
        assert message not in told, f"leads nowhere: {message}"
        told.append(message)
        if first := RUN_FIRST.search(message):
            run(shlex.split(first[1]))
            continue
        found = next(((f, change) for p, change in RULES if (f := re.search(p, message))), None)
        assert found is not None, f"cannot be followed: {message}"
        arguments = found[1](arguments, message, found[0])
    raise AssertionError("\n".join(told))


def run(command: list[str]) -> None:
    if command[:2] == ["mkdir", "-p"]:
        Path(command[2]).mkdir(parents=True)
        return
    outcome = within(*command[1:])
    assert outcome.code == 0, outcome.err


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: it has run.yaml, and nothing is prepared or trained."""
    folder = tmp_path / "a lab"
    write_run_file(folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    "line",
    [
        "config show missing.yaml",
        "config show 'no file.yaml'",
        "init run.yaml",
        "init no/such/run.yaml",
        "confg show run.yaml",
        "config shwo run.yaml",
        "config show run.yaml --orgin",
        "data inspect run.yaml",
        "data verify run.yaml data.sequence_length=8",
        "layout schedule --stages 3 --virtual 2 --schedule interleaved-1f1b",
        "layout schedule --schedule gpip",
        "layout schedule --stages 0",
        "layout schedule --stages 4 --forward 1,1",
        "layout schedule --stages 4 --forward x",
        "layout schedule --stages 4 --send -1",
        "layout show run.yaml --workers 5 layout.tp=2",
        "layout show run.yaml --workers 4 --ranks-per-node 1 --nodes a,b",
        "layout show run.yaml --what-if lost=99",
        "layout show run.yaml --what-if foo",
        "layout show run.yaml --workers 2 --nodes ''",
    ],
)
def test_remedies_before_a_run(line: str, lab: Path) -> None:
    assert follow_messages(shlex.split(line)), "this was no mistake"


@pytest.mark.parametrize(
    "line",
    [
        "checkpoint show {run} 99",
        "checkpoint verify {run} 99",
        "generate {run} the --step 99 --tokens 1",
        "generate {run} the --temperature -1 --tokens 1",
        "export {run} --to out --step 99",
        "export {run} --to out --dtype float3",
        "checkpoint diff {run}@99 {run}@3",
        "report {run} --output no/page.html",
    ],
)
def test_remedies_of_a_run(line: str, trained: Trained) -> None:
    assert follow_messages(shlex.split(line.format(run=trained.folder))), "this was no mistake"


def test_a_run_file_that_was_not_trained_names_its_training(lab: Path) -> None:
    within("report", "run.yaml").refuses("train it first: holdfast train run.yaml")


# --- files, stores, models and runs: one case a class of error and room ---------------------------
CASES = [*of_models.CASES, *of_runs.CASES, *of_lab.CASES, *of_platform.CASES]


@pytest.mark.parametrize("one", CASES, ids=str)
def test_the_remedy_leads_out(
    one: Case, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    carry_out(one, Lab(tmp_path, trained.folder))
