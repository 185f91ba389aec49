"""Rows of preferences: pairs and ratings, as TRL reads them, in samples that cut no pair."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from holdfast.config.sections.data import DataConfig
from holdfast.data.read.chat_borders import COLUMNS, TEXTS, ChatNotes
from holdfast.data.read.chat_documents import ChatFormat, ChatReader
from holdfast.data.stream.batch import MASKED_TARGET, Microbatch
from holdfast.data.stream.coverage import describe_use
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.inspect import render_sample
from holdfast.data.stream.verify import find_problems
from holdfast.errors import DataError
from tests.support.borders import unknown_entries
from tests.support.chat import CHATML, SPECIAL, WORDS, tokenizer_folder, write_rows
from tests.support.corpus import batches, data_config, make, train_config

USER, SYSTEM = "user", "system"


def asked(number: int) -> list[dict[str, str]]:
    """A prompt of one or three messages, whose replies carry no loss."""
    word = WORDS[number % len(WORDS)]
    said = [{"role": USER, "content": f"Say {word}, number {number}."}]
    if number % 3 == 0:
        said.append({"role": "assistant", "content": "Why?"})
        said.append({"role": USER, "content": "Because."})
    return said


def reply(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def good(number: int) -> str:
    return f"{WORDS[number % len(WORDS)]} {'so ' * (number % 5)}it is."


def bad(number: int) -> str:
    return f"No. {'never ' * (number % 4)}"


def pairs(count: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"prompt": asked(i), "chosen": reply(good(i)), "rejected": reply(bad(i))} | more
        for i in range(count)
    ]


def ratings(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": asked(i), "completion": reply(good(i) if i % 2 else bad(i)), "label": i % 2 > 0}
        for i in range(count)
    ]


def implicit(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row["prompt"] + row[key] for key in ("chosen", "rejected")}


def texts(row: dict[str, Any]) -> dict[str, Any]:
    """The same row with a text for each column."""
    said = {k: v[-1]["content"] if isinstance(v, list) else v for k, v in row.items()}
    return said | {"prompt": said["prompt"] + "\nAnswer:"}


def config_of(
    root: Path, rows: list[dict[str, Any]], form: str = "preference", **more: Any
) -> DataConfig:
    folder = tokenizer_folder(root / "tokenizer")
    path = write_rows(root / "rows.jsonl", rows)
    source = {"kind": "jsonl", "path": str(path), "rows": form, "name": "said"}
    defaults: dict[str, Any] = {
        "tokenizer": {"path": str(folder)},
        "attention": "document",
        "sequence_length": 300,
        "validation_fraction": 0,
    }
    return data_config(root / "dataset", source, **defaults | more)


def stored(dataset: Dataset) -> list[tuple[list[int], list[int]]]:
    """(tokens, mask) of each document."""
    (stream,) = dataset.streams("train")
    edges = stream.document_starts().tolist()
    return [
        (stream.read(a, b).tolist(), stream.read_mask(a, b).tolist()) for a, b in pairwise(edges)
    ]


# --- parity with TRL ----------------------------------------------------------------------------
@pytest.mark.slow  # importing TRL takes seconds
def test_ids_and_masks_are_those_of_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="compares with TRL, which is not installed")
    from datasets import Dataset as Table
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

    def prepared(trainer: Any, config: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """TRL's own preparation, without a model."""
        made = object.__new__(trainer)
        made._tokenizer, made.calculate_KL = tokenizer, True
        table = Table.from_list(rows)
        args = config(
            output_dir=str(tmp_path / "trl"), per_device_train_batch_size=len(rows), use_cpu=True
        )
        return list(made._prepare_dataset(table, tokenizer, args, "train"))

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder(tmp_path / "theirs"))
    for number, rows in enumerate(
        (pairs(12), [implicit(row) for row in pairs(12)], [texts(row) for row in pairs(12)])
    ):
        dataset = make(config_of(tmp_path / str(number), rows, shard_tokens=1024))
        ours = stored(dataset)
        assert len(ours) == 24
        for row, theirs in enumerate(prepared(DPOTrainer, DPOConfig, rows)):
            for (ids, mask), key in zip(
                ours[2 * row : 2 * row + 2], ("chosen_ids", "rejected_ids"), strict=True
            ):
                first = len(theirs["prompt_ids"])
                assert ids == theirs["prompt_ids"] + theirs[key]
                assert mask == [0] * first + [1] * len(theirs[key])
        reward = prepared(RewardTrainer, RewardConfig, rows)
        assert [ids for ids, _ in ours[0::2]] == [row["chosen_ids"] for row in reward]
        assert [ids for ids, _ in ours[1::2]] == [row["rejected_ids"] for row in reward]

    for name, rows in (("rated", ratings(12)), ("texts", [texts(row) for row in ratings(12)])):
        config = config_of(tmp_path / name, rows, "unpaired_preference")
        dataset = make(config)
        # TRL takes the completion of the row before, and this package that of the row after.
        reverse = prepared(KTOTrainer, KTOConfig, rows[::-1])[::-1]
        ours = stored(dataset)
        for row, theirs in enumerate(reverse):
            first = len(theirs["prompt_ids"])
            both = (theirs["completion_ids"], theirs["KL_completion_ids"])
            for (ids, mask), completion in zip(ours[2 * row : 2 * row + 2], both, strict=True):
                assert ids == theirs["prompt_ids"] + completion
                assert mask == [0] * first + [1] * len(completion)


# --- samples ------------------------------------------------------------------------------------
def documents_of(batch: Microbatch) -> list[list[tuple[list[int], dict[str, set[float]]]]]:
    """(inputs, values of side tensors) of each document with loss, by sample."""
    assert batch.documents is not None
    found = []
    for row, numbers in enumerate(batch.documents):
        sample = []
        for number in range(int(numbers.max()) + 1):
            here = numbers == number
            if (batch.targets[row][here] != MASKED_TARGET).any():
                side = {k: set(v[row][here].tolist()) for k, v in batch.side.items()}
                sample.append((batch.inputs[row][here].tolist(), side))
            else:
                assert number == int(numbers.max()), "only the padding has no loss"
        found.append(sample)
    return found


@pytest.mark.parametrize("form", ["preference", "unpaired_preference"])
def test_a_sample_has_complete_pairs_and_each_once(tmp_path: Path, form: str) -> None:
    rated = form != "preference"
    rows = ratings(60) if rated else pairs(60)
    if not rated:
        rows = [row | {"margin": i / 4} for i, row in enumerate(rows)]
    config = config_of(tmp_path, rows, form, shard_tokens=1024)
    dataset = make(config)
    assert find_problems(dataset) == []
    assert len(dataset.shards()) > 2
    ours = [ids for ids, _ in stored(dataset)]
    places = {tuple(ids): number for number, ids in enumerate(ours)}
    source = batches(dataset, config)
    (size,) = source.order.sizes
    fed = documents_of(source.read_samples(0, size))
    seen = []
    for sample in fed:
        for first, second in zip(sample[0::2], sample[1::2], strict=True):
            place = places[tuple(first[0])]
            assert place % 2 == 0
            assert ours[place + 1] == second[0]
            seen.append(place // 2)
            row = rows[place // 2]
            if rated:
                assert (first[1], second[1]) == (
                    {"label": {1.0 if row["label"] else -1.0}},
                    {"label": {0.0}},
                )
            else:
                assert first[1] == second[1] == {"margin": {row["margin"]}}
    assert sorted(seen) == list(range(60))
    assert len(fed) < 60, "samples are packed"
    blank = source.blank_microbatch(2)
    assert set(blank.side) == {"label" if rated else "margin"}
    assert (blank.targets == MASKED_TARGET).all()
    shown = render_sample(source, 0).split("\n=== next row ===\n")
    assert len(shown) == len(fed[0])
    begins = ("label ", "row of the KL baseline:") if rated else ("chosen, margin ", "rejected:")
    assert all(one.startswith(begins[i % 2]) for i, one in enumerate(shown))


def test_long_pairs_are_left_out_and_counted_or_cut(tmp_path: Path) -> None:
    rows = pairs(8)
    rows[3]["chosen"] = reply("very " * 200 + "long.")
    config = config_of(tmp_path, rows)
    dataset = make(config)
    lines = describe_use(dataset, config, train_config())
    assert any("1 pairs are left out and 0 cut" in line for line in lines)
    cut = config.model_copy(update={"chat": config.chat.model_copy(update={"long_rows": "cut"})})
    source = batches(dataset, cut)
    fed = [
        ids
        for sample in documents_of(source.read_samples(0, source.order.sizes[0]))
        for ids, _ in sample
    ]
    assert len(fed) == 16
    (long,) = [ids for ids in fed if len(ids) == 150]
    ours = stored(dataset)
    assert long == ours[6][0][:150], "cut as by TRL's max_length of half a sample"


# --- mistakes -----------------------------------------------------------------------------------
PAIR, PLAIN, RATED = pairs(1)[0], texts(pairs(1)[0]), ratings(1)[0]
NO_GENERATION_PROMPT = CHATML.split("{% if add_generation_prompt")[0]
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no rejected answer": (PAIR | {"rejected": None}, "'rejected' is missing"),
    "no rejected text": (PLAIN | {"rejected": None}, "'rejected' is missing"),
    "a column of another name": (
        {("chosn" if key == "chosen" else key): said for key, said in PAIR.items()},
        "did you mean chosen",
    ),
    "equal answers": (PAIR | {"rejected": PAIR["chosen"]}, "are equal"),
    "equal text": (
        PAIR | {"rejected": reply(good(0) + "\r\n"), "chosen": reply(good(0) + "\n")},
        "the same text",
    ),
    "an empty reply": (PAIR | {"rejected": reply(" ")}, "'rejected' is an empty reply"),
    "an empty text": (PLAIN | {"chosen": ""}, "'chosen' is an empty reply"),
    "no reply": (
        PAIR | {"chosen": [{"role": USER, "content": "Hm."}]},
        "'chosen' has no message to train on",
    ),
    "a text and a list": (PAIR | {"chosen": "Yes."}, "one of 'chosen' and 'rejected' is a list"),
    "a prompt of the other kind": (PLAIN | {"prompt": PAIR["prompt"]}, "'prompt' is a list"),
    "no common beginning": (
        {"chosen": [*asked(1), *PAIR["chosen"]], "rejected": [*asked(2), *PAIR["rejected"]]},
        "no first message in common",
    ),
    "texts without a common beginning": (
        {"chosen": "Yes", "rejected": "No"},
        "no common beginning",
    ),
    "one answer that continues the other": (
        {"chosen": PAIR["prompt"], "rejected": [*PAIR["prompt"], *PAIR["rejected"]]},
        "'chosen' has no message after",
    ),
    "another prompt": (implicit(PAIR) | {"prompt": "Sing."}, "'prompt' is a text, and no message"),
    "a margin that is no number": (PAIR | {"margin": "much"}, "'margin' is 'much'"),
    "a label for a pair": (PAIR | {"label": True}, "the row has label"),
    "a weighted prompt": (
        PAIR | {"prompt": [{"role": USER, "content": "Say.", "weight": 1}]},
        "a message of 'prompt' has a weight",
    ),
    "a label of words": (RATED | {"label": "yes"}, "'label' is 'yes'"),
    "a label of numbers": (RATED | {"label": 1}, "'label' is 1"),
    "no label": ({k: v for k, v in RATED.items() if k != "label"}, "'label' is missing"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_with_file_and_line(tmp_path: Path, name: str) -> None:
    row, says = MISTAKES[name]
    rated = "label" in name and "pair" not in name
    rows = [*(ratings(2) if rated else pairs(2)), row]
    form = "unpaired_preference" if rated else "preference"
    with pytest.raises(DataError, match=says) as caught:
        make(config_of(tmp_path, rows, form))
    assert str(caught.value).count("rows.jsonl:3") == 1
    assert caught.value.remedy
    assert not (tmp_path / "dataset" / "manifest.json").exists()


def test_a_template_must_begin_replies(tmp_path: Path) -> None:
    config = config_of(tmp_path, pairs(2))
    tokenizer_folder(tmp_path / "tokenizer", NO_GENERATION_PROMPT)
    with pytest.raises(DataError, match=r"rows.jsonl:1.*add_generation_prompt"):
        make(config)


def test_margins_are_those_of_all_pairs_or_of_none(tmp_path: Path) -> None:
    rows = [*pairs(2, margin=0.5), *pairs(3)[2:]]
    with pytest.raises(DataError, match=r"1 pairs have no margin, and 2 have one") as caught:
        make(config_of(tmp_path, rows))
    assert "rows.jsonl:3" in str(caught.value)


def test_preferences_stand_alone() -> None:
    source = {"kind": "jsonl", "path": "a"}
    mixed = [source | {"rows": "preference", "name": "a"}, source | {"rows": "messages"}]
    more: dict[str, Any]
    for more, says in (
        ({"sources": mixed}, "use one form for all sources"),
        ({"chat": {"weights": True}}, "chat.weights true has no meaning"),
    ):
        given = {"sources": mixed[:1], "attention": "document", "tokenizer": {"path": "a"}}
        with pytest.raises(ValidationError, match=says):
            DataConfig.model_validate(given | more)


@pytest.mark.parametrize("form", ["preference", "unpaired_preference"])
@pytest.mark.parametrize("as_texts", [False, True])
def test_columns_are_used_counted_or_named(form: str, as_texts: bool) -> None:
    rated = form != "preference"
    row = ratings(1)[0] if rated else pairs(1, margin=1)[0]
    row = texts(row) if as_texts else row
    border = COLUMNS[TEXTS[form] if as_texts else form]
    format = ChatFormat(CHATML, (), SPECIAL, ("assistant",))

    def read(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        notes = ChatNotes()
        return ChatReader(form, "text", format, notes).read(row, "rows.jsonl:3"), notes.seen

    drawn = unknown_entries(border)
    text, seen = read(row | drawn)
    assert text == read(row)[0]
    assert seen[border.name] == dict.fromkeys(drawn, (1, "rows.jsonl:3"))
    refused = [key for key, plain in border.plain.items() if not plain]
    for key in (*refused, "loss_mask", "labels", "weight"):
        with pytest.raises(DataError, match=rf"rows.jsonl:3: (this|the row) has {key}"):
            read(row | {key: ["a"]})
    assert set(row) <= border.used
