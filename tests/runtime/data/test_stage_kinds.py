"""The stages `language`, `perplexity`, `contamination` and `function`, each on its own texts."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from holdfast.config.loading.load import load_config
from holdfast.config.sections.stages import StageConfig
from holdfast.data.filters.chain import Chain
from holdfast.data.filters.perplexity import STEPS_OF_BIT, perplexity, train_model
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.prepare.stage_files import ready_stages
from holdfast.data.prepare.stage_recipes import stage_recipes
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.document_reads import find_document
from holdfast.errors import DataError
from tests.runtime.data.test_stages import all_texts, lines_file, name_of, removed
from tests.support.corpus import data_config, make, tree
from tests.support.stage_texts import page


def chain_in(folder: Path, *stages: dict[str, Any]) -> tuple[Chain, list[str]]:
    """The chain of stages, their tables in a folder, and what was said."""
    source = lines_file(folder / "unused.jsonl", ["unused"])
    config = data_config(folder / "out", source, stages=stages)
    said: list[str] = []
    ready = ready_stages(config, stage_recipes(config), folder / "tables", said.append)
    return Chain(list(enumerate(ready))), said


def text_file(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


SENTENCES = {
    "en": "The river was high after the rain, and the children went to look at the bridge.",
    "de": "Der Fluss war nach dem Regen hoch, und die Kinder gingen zur Brücke, um sie anzusehen.",
    "fr": "La rivière était haute après la pluie, et les enfants sont allés regarder le pont.",
    "ru": "После дождя река поднялась, и дети пошли смотреть на мост через неё.",
    "ja": "雨のあとで川の水が増えたので、子どもたちは橋を見に行きました。",
}


def test_documents_of_other_languages_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("py3langid")
    chain, _ = chain_in(tmp_path, {"kind": "language", "languages": ["en", "ja"]})
    found = {code: chain.judge(text) for code, text in SENTENCES.items()}
    assert {code: o.rule for code, o in found.items()} == {
        "en": "",
        "de": "de",
        "fr": "fr",
        "ru": "ru",
        "ja": "",
    }
    score = found["de"].score
    assert score is not None
    assert 0.5 < score <= 1
    sure, _ = chain_in(tmp_path, {"kind": "language", "languages": ["en"], "min_probability": 1.0})
    assert sure.judge("ok it is so").rule == "unsure"
    with pytest.raises(DataError, match="xx is no language"):
        chain_in(tmp_path, {"kind": "language", "languages": ["xx"]})


def reference_perplexity(training: list[str], order: int, text: str) -> float:
    """The same model written as the paper writes it, with dictionaries."""
    counts: list[Counter[tuple[str, ...]]] = [Counter() for _ in range(order + 1)]
    for document in training:
        words = document.split()
        for n in range(1, order + 1):
            counts[n].update(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    follow = [Counter(gram[:-1] for gram in counts[n]) for n in range(1, order + 1)]
    times: list[Counter[tuple[str, ...]]] = [Counter() for _ in range(order)]
    for n in range(1, order + 1):
        for gram, count in counts[n].items():
            times[n - 1][gram[:-1]] += count
    uniform = 1 / (len(counts[1]) + 1)

    def probability(gram: tuple[str, ...]) -> float:
        if not gram:
            return uniform
        below = probability(gram[1:])
        n = len(gram)
        c, t = times[n - 1][gram[:-1]], follow[n - 1][gram[:-1]]
        return below if not c else (counts[n][gram] + t * below) / (c + t)

    words = text.split()
    bits = [
        -math.log2(probability(tuple(words[max(0, i - order + 1) : i + 1])))
        for i in range(len(words))
    ]
    return float(2 ** (sum(bits) / len(bits)))


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_the_model_is_that_of_witten_and_bell(order: int) -> None:
    rng = random.Random(order)
    vocabulary = [f"word{i}" for i in range(30)]
    weights = [1 / (i + 1) for i in range(30)]
    training = [" ".join(rng.choices(vocabulary[:25], weights[:25], k=40)) for _ in range(30)]
    table = train_model(training, order)
    model = tuple(table[name] for name in ("keys", "logs", "backs", "unknown"))
    for _ in range(20):
        text = " ".join(rng.choices(vocabulary, weights, k=30))
        expected = reference_perplexity(training, order, text)
        assert perplexity(text, order, model) == pytest.approx(expected, rel=2 / STEPS_OF_BIT)


def test_a_model_of_many_texts_is_that_of_one_count(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [page(seed) for seed in range(40)]
    at_once = train_model(texts, 3)
    monkeypatch.setattr("holdfast.data.filters.perplexity._MERGED", 500)
    in_parts = train_model(texts, 3)
    assert all(np.array_equal(at_once[name], in_parts[name]) for name in at_once)


def test_documents_that_a_model_does_not_expect_are_left_out(tmp_path: Path) -> None:
    good = text_file(tmp_path / "good.txt", " ".join(page(seed) for seed in range(200)))
    stage = {"kind": "perplexity", "texts": [{"path": good}], "max_perplexity": 1000}
    chain, _ = chain_in(tmp_path, stage)
    rng = random.Random(5)
    noise = " ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(80))
    assert [chain.judge(text).rule for text in (page(900), noise)] == ["", "max_perplexity"]
    score = chain.judge(noise).score
    assert score is not None
    assert score > 1000
    narrow, _ = chain_in(tmp_path, {**stage, "max_perplexity": 0, "min_perplexity": 1000})
    assert [narrow.judge(text).rule for text in (page(900), noise)] == ["min_perplexity", ""]


def test_documents_with_evaluation_texts_are_left_out_and_counted(tmp_path: Path) -> None:
    quiz = [page(5000 + i, 3) for i in range(40)] + ["What is two plus two?"]
    exam = [page(6000 + i, 4) for i in range(10)]
    sets = [
        {"kind": "jsonl", "path": lines_file(tmp_path / "quiz.jsonl", quiz)["path"]},
        {"path": text_file(tmp_path / "exam.txt", "\n".join(exam)), "name": "exam"},
    ]
    clean = [page(seed) for seed in range(60)]
    planted = [f"{page(100 + i)} {quiz[i].upper()}! {page(200 + i)}" for i in range(40)]
    planted += [f"{page(300 + i)}\n{exam[i]}" for i in range(10)]
    source = lines_file(tmp_path / "web.jsonl", [*clean, "What is two plus two?", *planted])
    said: list[str] = []
    dataset = prepare_dataset(
        data_config(tmp_path / "out", source, stages=[{"kind": "contamination", "texts": sets}]),
        say=said.append,
    )
    assert dataset.manifest["stages"]["left_out"] == [
        {"source": "web", "stage": 0, "kind": "contamination", "rule": name, "count": count}
        for name, count in (("exam", 10), ("quiz.jsonl", 40))
    ]
    assert any("1 of 41 texts of quiz.jsonl have too few words" in line for line in said)
    assert not any("min_matches" in line for line in said)
    listed = removed(dataset)
    assert {line["document"] for line in listed} == {name_of(text) for text in planted}
    assert all(line["score"] >= 1 for line in listed)
    assert sorted(all_texts(dataset)) == sorted([*clean, "What is two plus two?"])


FUNCTION = '''
def tidy(text):
    """Leave notes out, and write a name in full."""
    if text.startswith("Note"):
        return False
    if "Dr." not in text:
        return True
    return text.replace("Dr.", "Doctor")
'''


def with_function(folder: Path, source: str, name: str = "tidy") -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return {"kind": "function", "function": text_file(folder / "own.py", source) + f":{name}"}


def test_a_function_of_the_user_leaves_out_and_changes(tmp_path: Path) -> None:
    texts = [*(page(seed) for seed in range(12)), f"Note. {page(50)}", f"Dr. May. {page(51)}"]
    source = lines_file(tmp_path / "web.jsonl", texts)
    config = data_config(tmp_path / "out", source, stages=[with_function(tmp_path, FUNCTION)])
    dataset = make(config)
    found = dataset.manifest["stages"]
    entry = {"source": "web", "stage": 0, "kind": "function", "rule": "tidy", "count": 1}
    assert found["left_out"] == found["changed"] == [entry]
    assert any(text.startswith("Doctor May.") for text in all_texts(dataset))
    # A document is found by its text as the source has it, with the function's file.
    assert len(find_document(dataset, texts[-1])) == 1
    moved = [{**with_function(tmp_path / "other", FUNCTION), "sources": []}]
    again = make(data_config(tmp_path / "again", source, stages=moved))
    assert tree(again.folder)["manifest.json"] == tree(dataset.folder)["manifest.json"]
    (tmp_path / "own.py").write_text(FUNCTION.replace("Note", "Noted"))
    with pytest.raises(DataError, match="has changed"):
        find_document(Dataset.open(tmp_path / "out"), texts[-1])
    said: list[str] = []
    prepare_dataset(config, say=said.append)
    assert any("data.stages[0] (function: files)" in line for line in said)
    (tmp_path / "own.py").unlink()  # a dataset stands for itself
    assert make(config).version == dataset.version


BAD_FUNCTIONS = {
    "raises": ("def tidy(text):\n    return len(text) / 0", "ZeroDivisionError"),
    "none": ("def tidy(text):\n    text.strip()", "returned NoneType"),
    "no function": ("def other(text):\n    return True", "no function tidy"),
    "syntax": ("def tidy(text)\n    return True", "SyntaxError"),
    "import": ("import not_there_at_all", "not_there_at_all"),
    "exit": ("def tidy(text):\n    raise SystemExit(0)", "SystemExit"),
    "exit at import": ("raise SystemExit(0)", "SystemExit"),
    "numpy": ("import numpy\ndef tidy(text):\n    return numpy.bool_(True)", "returned numpy."),
    "random": ("import random\ndef tidy(text):\n    return str(random.random())", "two answers"),
    "state": (
        "import itertools\nn = itertools.count()\ndef tidy(text):\n    return f'{text} {next(n)}'",
        "two answers|the second time",
    ),
}


@pytest.mark.parametrize("what", BAD_FUNCTIONS)
def test_a_function_that_cannot_be_used_is_refused_in_a_sentence(tmp_path: Path, what: str) -> None:
    source = lines_file(tmp_path / "web.jsonl", [page(seed, 3) for seed in range(40)])
    code, expected = BAD_FUNCTIONS[what]
    config = data_config(tmp_path / "out", source, stages=[with_function(tmp_path, code)])
    with pytest.raises(DataError, match=expected) as refusal:
        make(config)
    assert refusal.value.where
    assert refusal.value.remedy
    assert page(0, 3)[:20] not in str(refusal.value)


def test_what_a_function_prints_is_no_output_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "print('loaded')\ndef tidy(text):\n    print('called')\n    return True"
    chain, _ = chain_in(tmp_path, with_function(tmp_path, code))
    chain.judge(page(1))
    printed = capsys.readouterr()
    assert "called" in printed.err
    assert not printed.out


def test_matches_that_no_document_can_have_are_said(tmp_path: Path) -> None:
    quiz = text_file(tmp_path / "quiz.txt", page(77, 4))
    stage = {"kind": "contamination", "texts": [{"path": quiz}], "min_matches": 10_000}
    source, said = lines_file(tmp_path / "web.jsonl", [page(1), page(2)]), list[str]()
    prepare_dataset(data_config(tmp_path / "out", source, stages=[stage]), say=said.append)
    assert any("no document can have min_matches 10000" in line for line in said), said


def test_a_refused_text_of_a_stage_names_the_stage_and_no_source(tmp_path: Path) -> None:
    rows = text_file(tmp_path / "quiz.jsonl", '{"question": "What is it?"}\n')
    stage = {"kind": "contamination", "texts": [{"kind": "jsonl", "path": rows}]}
    with pytest.raises(DataError) as refusal:
        chain_in(tmp_path, stage)
    assert str(refusal.value.where).startswith("data.stages[0].texts[0]: ")
    assert "data.stages[0].texts[0]" in str(refusal.value.remedy)
    assert "source" not in str(refusal.value)


def test_the_version_follows_the_bytes_of_texts_and_functions_but_not_their_paths(
    tmp_path: Path,
) -> None:
    source = lines_file(tmp_path / "web.jsonl", [page(seed, 4) for seed in range(30)])

    def version(name: str, evaluation: str, code: str) -> str:
        folder = tmp_path / name
        stages = [
            with_function(folder, code),
            {
                "kind": "contamination",
                "texts": [{"path": text_file(folder / f"{name}.txt", evaluation), "name": "quiz"}],
            },
            {
                "kind": "perplexity",
                "texts": [{"path": text_file(folder / "good.txt", page(1, 90))}],
                "max_perplexity": 1e9,
            },
        ]
        return make(data_config(folder / "out", source, stages=stages)).version

    quiz = page(77, 4)
    first = version("a", quiz, FUNCTION)
    assert version("b", quiz, FUNCTION) == first
    others = {version("c", quiz + ".", FUNCTION), version("d", quiz, FUNCTION + "#")}
    assert len({first, *others}) == 3


def test_paths_of_stages_start_at_the_run_file(tmp_path: Path) -> None:
    stages = [
        {"kind": "function", "function": "own.py:tidy"},
        {"kind": "contamination", "texts": [{"path": "quiz.txt"}]},
    ]
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump({"data": {"stages": stages}}))
    found = load_config(run, []).config.data.stages
    assert found[0].place == (str(tmp_path / "own.py"), "tidy")
    assert found[0].function == "own.py:tidy"
    assert found[1].texts[0].place == str(tmp_path / "quiz.txt")


@pytest.mark.parametrize(
    ("stage", "place"),
    [
        ({"kind": "function", "function": "/not/there.py:x"}, "data.stages[0].function"),
        (
            {"kind": "contamination", "texts": [{"path": "/not/there.txt"}]},
            "data.stages[0].texts[0]",
        ),
        (
            {"kind": "perplexity", "texts": [{"path": "/not/there"}], "max_perplexity": 5},
            "data.stages[0].texts[0]",
        ),
    ],
)
def test_a_missing_file_of_a_stage_is_named_with_its_key(
    tmp_path: Path, stage: dict[str, Any], place: str
) -> None:
    with pytest.raises(DataError) as refusal:
        chain_in(tmp_path, stage)
    assert place in str(refusal.value.where)
    assert refusal.value.remedy


@pytest.mark.parametrize(
    "stage",
    [
        {"kind": "language"},
        {"kind": "language", "languages": ["English"]},
        {"kind": "perplexity", "max_perplexity": 5},
        {"kind": "perplexity", "texts": [{"path": "a"}]},
        {"kind": "contamination"},
        {"kind": "contamination", "texts": [{"path": "a/x"}, {"path": "b/x"}]},
        {"kind": "function"},
        {"kind": "function", "function": "own.keep"},
        {"kind": "length", "min_words": 3, "texts": [{"path": "a"}]},
    ],
)
def test_an_entry_that_says_too_little_is_refused(stage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"use|remove"):
        StageConfig.model_validate(stage)
