"""Rewards of completions: their numbers, and one sentence for each that cannot be trusted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from holdfast.config.sections.rewards import RewardConfig
from holdfast.errors import RewardError
from holdfast.rollout.prompts import Prompt
from holdfast.rollout.rewards.program import program_in
from holdfast.rollout.rewards.rewards import Rewards
from tests.support.chat import tokenizer_folder

FUNCTIONS = """
import os, random, time
calls = []

def length(completion, answer, skill):
    print("this goes to the log")
    return len(completion) - len(answer) + len(skill)

def of_trl(prompts, completions, completion_ids, skill, **rest):
    assert rest == {"answer": ["red"], "tests": [""]}, rest
    return [len(c) + sum(i) / 100 for c, i in zip(completions, completion_ids)]

def raises(completion):
    return {}["missing"]

def hangs(completion):
    while completion == "hang":
        time.sleep(0.01)
    return 1

def counts(completion):
    calls.append(1)
    return len(calls)

def ends(completion):
    os._exit(3)

def own_pid(completion):
    return os.getpid()

def nan(completion):
    return float("nan")

def text(completion):
    return "good"

def nothing(completion):
    pass

def state(completions, trainer_state):
    return [0.0]

def other(completion, colour):
    return 0

number = 3
"""
COLUMNS = {"answer": "red", "skill": "copy", "tests": ""}
PROMPT = Prompt(5, (1, 2), "Say red.", "words", "red", COLUMNS, "a.jsonl:6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("functions")
    (place / "mine.py").write_text(FUNCTIONS, "utf-8")
    return str(place)


@pytest.fixture
def opened(folder: str) -> Iterator[Any]:
    made: list[Rewards] = []

    def open_one(**entry: Any) -> Rewards:
        made.append(Rewards([RewardConfig(**entry)], folder))
        return made[-1]

    yield open_one
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("entry", "text", "number"),
    [
        ({"kind": "exact_match"}, " red\n", 1),
        ({"kind": "exact_match"}, "Red", 0),
        ({"kind": "exact_match", "ignore_case": True}, "Red", 1),
        ({"kind": "exact_match", "pattern": r"is (\w+)"}, "it is blue, no, it is red!", 1),
        ({"kind": "exact_match", "pattern": r"is (\w+)"}, "it is red, no, it is blue!", 0),
        ({"kind": "regex", "pattern": "^r.d$"}, "rod", 1),
        ({"kind": "regex", "pattern": "^r.d$"}, "rods", 0),
    ],
)
def test_verifiers(opened: Any, entry: dict[str, Any], text: str, number: float) -> None:
    assert opened(**entry).rate(PROMPT, text, ()) == (number,)


def test_a_function_gets_what_it_names_and_a_killed_process_is_replaced(opened: Any) -> None:
    rewards = opened(kind="function", function="mine:length", weight=0.5)
    assert rewards.rate(PROMPT, "reds", ()) == (5.0,)
    assert rewards.total((5.0,)) == 2.5
    os.kill(rewards._parts[0]._child.pid, signal.SIGKILL)
    assert rewards.rate(PROMPT, "red", ()) == (4.0,)
    assert opened(kind="function", function="mine:of_trl").rate(PROMPT, "red", (7,)) == (3.07,)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "mine:raises raised KeyError: 'missing' (mine.py:14) at prompt 5 (a.jsonl:6)"),
        ("counts", "the same completion of prompt 5 gets 1, then 2"),
        ("ends", "mine:ends ended its process (exit code 3) at prompt 5"),
        ("nan", "the reward of prompt 5 (a.jsonl:6) is nan, and not a finite number"),
        ("text", "is 'good', and not a finite number"),
        ("nothing", "is None, and not a finite number"),
        ("state", "needs the argument trainer_state, which is not given"),
        ("other", "needs the argument colour, which is no column of the prompt"),
        ("number", "mine:number is no function, but int"),
        ("missing", "mine:missing does not exist"),
    ],
)
def test_a_function_that_cannot_be_trusted_is_one_sentence(
    opened: Any, name: str, said: str
) -> None:
    with pytest.raises(RewardError) as refused:
        opened(kind="function", function=f"mine:{name}").check([PROMPT])
    assert str(refused.value).startswith("rollout.rewards.0: ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_hang_ends_the_run_unless_a_key_has_its_number(opened: Any) -> None:
    entry = {"kind": "function", "function": "mine:hangs", "timeout_s": 0.5}
    refusing = opened(**entry)
    refusing.check([PROMPT])
    with pytest.raises(RewardError, match=r"took more than timeout_s 0\.5 at prompt 5"):
        refusing.rate(PROMPT, "hang", ())
    rated = opened(**entry, on_timeout=-1)
    rated.check([PROMPT])
    assert rated.rate(PROMPT, "hang", ()) == (-1.0,)
    assert rated.rate(PROMPT, "red", ()) == (1.0,)


PASSES = "```python\ndef f(x):\n    return x + 1\n```"
TESTS = "assert f(1) == 2"
ESCAPES = {
    "exits before its tests": "import os; os._exit(0)",
    "network": "import socket; socket.create_connection(('127.0.0.1', PORT), 1)",
    "file": "open('SECRET').read()",
    "list": "import os; os.listdir('/tmp')",
    "write": "open('/tmp/holdfast-escape', 'w')",
    "other processes": "import os, signal; os.kill(OURS, 0)",
    "memory": "x = bytearray(1 << 31)",
    "large file": "open('big', 'wb').write(b'0' * (20 << 20))",
}
REACHABLE = ("network", "file", "list", "other processes")
"""What isolation alone keeps from a program."""


def test_a_program_passes_its_tests_or_gives_the_answer(opened: Any) -> None:
    entry = {"kind": "code", "on_timeout": -2, "timeout_s": 1}
    of_tests, of_output = opened(**entry, tests="tests"), opened(**entry)
    prompt = Prompt(5, (), "", "", "3", {"tests": TESTS}, "")
    assert of_tests.rate(prompt, f"So:\n{PASSES}", ()) == (1.0,)
    assert of_tests.rate(prompt, PASSES.replace("1", "2"), ()) == (0.0,)
    assert of_output.rate(prompt, "print(1 + 2)", ()) == (1.0,)
    assert of_output.rate(prompt, "print(1)", ()) == (0.0,)
    assert of_output.rate(prompt, "while True: pass", ()) == (-2.0,)
    assert program_in("a\n```\nb\n```\nc\n```py\nd\n") == "d\n"


def test_a_program_does_not_get_out(opened: Any, tmp_path: Path) -> None:
    import socket

    secret = tmp_path / "secret"
    secret.write_text("x")
    reward = opened(kind="code", on_timeout=-2, tests="tests", memory_mb=512)
    limits = opened(kind="code", on_timeout=-2, tests="tests", isolation="limits")
    prompt = Prompt(5, (), "", "", None, {"tests": ""}, "")
    assert reward.rate(prompt, "import json, random; open('mine', 'w').write('x')", ()) == (1.0,)
    with socket.create_server(("127.0.0.1", 0)) as server:
        places = {"PORT": str(server.getsockname()[1]), "SECRET": str(secret)}
        for what, program in ESCAPES.items():
            for word, place in (places | {"OURS": str(os.getpid())}).items():
                program = program.replace(word, place)
            assert reward.rate(prompt, program, ()) == (0.0,), what
            if what in REACHABLE:
                assert limits.rate(prompt, program, ()) == (1.0,), what


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"kind": "regex"}, "pattern is missing for kind: regex"),
        ({"kind": "regex", "pattern": "("}, "is no regular expression"),
        ({"kind": "code"}, "use on_timeout: 0"),
        ({"kind": "exact_match", "timeout_s": 3}, "timeout_s has no effect with kind: exact_match"),
        ({"kind": "function", "function": "score"}, "use the form my_rewards:score"),
    ],
)
def test_keys_of_another_kind_are_refused(entry: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RewardConfig(**entry)


def test_a_prompt_without_what_a_reward_compares_with_is_refused(opened: Any) -> None:
    bare = Prompt(8, (), "", "", None, {}, "a.jsonl:9")
    with pytest.raises(RewardError, match=r"prompt 8 \(a.jsonl:9\) has no answer"):
        opened(kind="exact_match").check([PROMPT, bare])
    with pytest.raises(RewardError, match="has no text in the column 'tests'"):
        opened(kind="code", tests="tests", on_timeout=0).check([PROMPT, bare])


@pytest.mark.slow
def test_a_reward_model_of_transformers_rates_prompt_and_completion(
    opened: Any, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="it makes the reward model")
    folder = tokenizer_folder(tmp_path / "model")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 400}
    heads = {"num_attention_heads": 2, "num_labels": 1, "pad_token_id": 0}
    model = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**shape, **heads)
    ).eval()
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": "Say red."}]
    reply = {"role": "assistant", "content": "red"}
    reward = opened(kind="model", path=str(folder))
    for said, ids in (
        ("Say red.", tokenizer("Say red.red").input_ids),
        (tuple(asked), tokenizer.apply_chat_template([*asked, reply])["input_ids"]),
    ):
        expected = model(torch.tensor([ids])).logits.item()
        prompt = Prompt(0, (), said, "", None, {}, "")
        assert reward.rate(prompt, "red", ()) == (pytest.approx(expected, abs=1e-7),)
    two = tmp_path / "two"
    tokenizer_folder(two)
    heads["num_labels"] = 2
    transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**shape, **heads)
    ).save_pretrained(two)
    with pytest.raises(RewardError, match="has 2 labels, and a reward model has one"):
        opened(kind="model", path=str(two))
    with pytest.raises(RewardError, match="does not exist"):
        opened(kind="model", path=str(tmp_path / "none"))
