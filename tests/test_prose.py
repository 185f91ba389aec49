"""The prose gate: what it reads, what it counts, and when it fails."""

from __future__ import annotations

import ast
import io
import json
import tokenize
from pathlib import Path

import pytest
from tools import prose

LONG = "one two three four five six seven eight nine ten " * 3


def found(text: str, name: str = "page.md", messages: bool = True) -> list[str]:
    """Return the banned words of a text, and the word counts of long sentences."""
    these = prose.findings(Path(name), text, messages)
    return [
        str(one.words) if one.words else one.text for one in sorted(these, key=lambda one: one.line)
    ]


@pytest.mark.parametrize(
    ("text", "banned"),
    [
        ("Wake whoever waits; nobody asks.", ["whoever", "nobody"]),
        ("The others wait, and he does not.", ["others", "he"]),
        ("As in He et al., the other nodes and another one.", []),
        ("It lies beside the file. Besides, it is new.", ["beside", "besides"]),
        ("Training goes on. It went on where it was.", ["goes on", "went on"]),
        ("It goes on the disk; it runs on disk; it goes on stdout.", []),
        ("The worker stands still, or stood\nstill.", ["stands still", "stood still"]),
        ("The node is done without. Do without it.", ["done without", "do without"]),
        ("It can be done without stopping the run.", []),
        ("The agent is told. It was never told.", ["is told", "was never told"]),
        ("The agent told the node to stop. They cannot be told apart.", []),
        ("The whole state, a whole number, whole numbers.", ["whole"]),
        ("Nothing is gone. It is rotten, once anew.", ["gone", "rotten", "anew"]),
        ("It is saved all the same. They are all the same.", ["all the same"]),
        ("Take it, else wait. Nothing else, somewhere else.", ["else"]),
        ("Any state, be it old. It would be it.", ["be it"]),
        (
            "Copy as far as possible, in a word: notices cannot be had.",
            ["as far as", "in a word", "be had"],
        ),
        ("Who leads is new. Where it fails, wait.", ["Who", "Where"]),
        ("Who leads? The node where it runs, the person who reads.", []),
        ("# Where code belongs", []),
        ("Read `whoever` and ``gone`` at https://a.b/gone, [here](whole.md).", []),
    ],
)
def test_banned_words(text: str, banned: list[str]) -> None:
    assert found(text) == banned


def test_a_sentence_of_26_words_is_long() -> None:
    words = ["word"] * 25
    assert found(" ".join(words) + ".") == []
    assert found(" ".join([*words, "more."])) == ["26"]
    assert found(" ".join([*words[:15], "`some code of`", "https://a/b", *words[:9]])) == ["26"]
    assert found(" ".join([*words[:20], "e.g.", *words[:5]])) == ["26"]  # no end of a sentence


@pytest.mark.parametrize(
    "text",
    [
        "First one.\n\nSecond.",
        f"```\n{LONG}\n```",
        f"Run:\n\n    {LONG}\n    nobody\n",
        "| " + " | ".join(LONG.split()) + " |\n|---|",
        "".join(f"- {word}\n" for word in LONG.split()),
        "".join(f"{number}. of a list\n" for number in range(20)),
    ],
)
def test_blocks_are_sentences_of_their_own_and_code_is_skipped(text: str) -> None:
    assert found(text) == []


def test_words_of_a_wrapped_sentence_are_counted_together() -> None:
    half = "one two three four five six seven eight nine ten eleven twelve thirteen"
    assert found(f"{half}\n{half}.") == ["26"]
    assert found(f"- {half}\n  {half}.") == ["26"]
    assert found(f"# {half}\n# {half}.\n", "a.py") == ["26"]
    assert found(f'x = ("{half} "\n     f"{half}")\n', "src/a.py") == ["26"]


def test_entries_of_an_args_block_are_sentences_of_their_own() -> None:
    entries = "".join(f"        name{n}: three more words\n" for n in range(12))
    assert found(f'def f():\n    """Do.\n\n    Args:\n{entries}    """\n', "a.py") == []


def test_code_is_not_read_but_docstrings_comments_and_messages_are() -> None:
    source = (
        '"""Module: nobody."""\n'
        "whole = gone = 1\n"
        '"""Doc of a name: anew."""\n'
        "x = '# rotten'  # beside\n"
        "short = 'gone'\n"
        'say(f"the node {whole} that fails is {gone!r} and others wait")  # noqa: B\n'
    )
    assert found(source, "src/a.py") == ["nobody", "anew", "beside", "others"]
    assert found(source, "tests/a.py", messages=False) == ["nobody", "anew", "beside"]
    assert found("a: gone  # nobody\n# anew\n", "run.yaml") == ["nobody", "anew"]


def test_lines_are_those_of_the_file() -> None:
    source = 'x = 1\n\n\ndef f():\n    """Do.\n\n    Then\n    nobody.\n    """\n    # anew\n'
    these = prose.findings(Path("a.py"), source, False)
    assert [(one.line, one.text) for one in these] == [(8, "nobody"), (10, "anew")]


def test_the_scanner_agrees_with_ast_and_tokenize() -> None:
    source = Path(prose.__file__).read_text("utf-8") + Path(__file__).read_text("utf-8")
    lines = {number for text in prose.python_texts(source, False) for number, line in text if line}
    wanted = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not prose.TOOLING.match(token.string)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = str(node.value.value).split("\n")
            wanted |= {node.lineno + n for n, line in enumerate(text) if line.strip()}
    assert lines == wanted


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a tree whose stored counts are those of its page."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/x.md").write_text("Nobody waits.\nIt is\ngone.\n")
    assert prose.main(["--root", str(tmp_path), "--update"]) == 0
    return tmp_path


def stored(tree: Path) -> dict[str, list[int]]:
    """Return the stored counts."""
    return dict(json.loads((tree / "tools/prose_counts.json").read_text()))


def test_a_risen_count_fails_with_lines_and_words(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tree / "docs/x.md"
    assert stored(tree) == {"docs/x.md": [2, 0]}
    assert prose.main(["--root", str(tree)]) == 0
    page.write_text(page.read_text() + f"Anew.\n\n{LONG}\n")
    capsys.readouterr()
    assert prose.main(["--root", str(tree), "--update"]) == 1
    assert capsys.readouterr().out.split("\n")[0] == (
        "docs/x.md: 3 banned words, 2 allowed: line 1 'nobody', line 3 'gone', line 4 'anew'; "
        "1 long sentences, 0 allowed: line 6 (30 words)"
    )
    assert stored(tree) == {"docs/x.md": [2, 0]}  # an update never raises a count


def test_an_update_stores_lower_counts_only(tree: Path) -> None:
    (tree / "docs/x.md").write_text("Nobody waits.\n")
    (tree / "docs/new.md").write_text("Nobody waits.\n")
    assert prose.main(["--root", str(tree), "--update"]) == 1  # a new file is allowed none
    assert stored(tree) == {"docs/x.md": [1, 0]}
    (tree / "docs/x.md").unlink()
    (tree / "docs/new.md").write_text("The node waits.\n")
    assert prose.main(["--root", str(tree), "--update"]) == 0
    assert stored(tree) == {}


def test_list_and_totals(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert prose.main(["--root", str(tree), "--list", "docs/"]) == 0
    assert capsys.readouterr().out == "docs/x.md:1: nobody\ndocs/x.md:3: gone\n"
    assert prose.main(["--root", str(tree), "--totals"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["docs", "2"],
        ["total", "2"],
    ]
