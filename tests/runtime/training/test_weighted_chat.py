"""Messages with weights of hundredths: the loss is a weighted sum over the sum of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.verify import find_problems
from holdfast.errors import DataError
from holdfast.tasks.task.batches import TokenBatches
from holdfast.training.engine.task import DecoderTask
from tests.runtime.training.test_chat_batches import (
    alone,
    body,
    check_curve,
    data_of,
    prepared,
    reference,
)
from tests.support.chat import message_rows
from tests.support.corpus import make
from tests.support.layouts import case, config_of
from tests.support.marks import in_campaign
from tests.support.ranks import rank_values

WEIGHTS = (1, 0.5, 0.07, 2.54, 0, None, 1.3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Replies with weights in turn."""
    rows = message_rows(80)
    replies = [m for row in rows for m in row["messages"] if m["role"] == "assistant"]
    for number, reply in enumerate(replies):
        reply["weight"] = WEIGHTS[number % len(WEIGHTS)]
    return prepared(tmp_path_factory.mktemp("weighted"), rows, weights=True)


@pytest.mark.parametrize("name", ["dp2", in_campaign("dp3")])
def test_replicas_are_bit_equal(name: str, corpus: Path) -> None:
    expected, _ = alone(corpus, weights=True)
    assert any(weight % 1 for weight in expected["tokens"])
    of = case(f"shallow.{name}")
    arguments = {"name": of.name, "root": str(corpus), "weights": True}
    for value in rank_values(body, of.world_size, arguments):
        assert value == expected


@pytest.mark.parametrize(
    "name", [in_campaign(name) for name in ("pp2-tp2", "zero1.2", "shard2", "tp2")]
)
def test_each_layout_gives_the_curve_of_one_process(
    name: str, corpus: Path, tmp_path: Path
) -> None:
    check_curve(name, corpus, tmp_path, weights=True)


def test_the_loss_is_that_of_each_row_alone_with_weights_by_hand(corpus: Path) -> None:
    expected, _ = alone(corpus, weights=True)
    (value,) = rank_values(reference, 1, {"root": str(corpus), "weights": True})
    assert value["tokens"] == pytest.approx(expected["tokens"][0], rel=1e-7)
    assert value["loss"] == pytest.approx(expected["losses"][0], rel=1e-7)


def test_a_dataset_with_weights_is_marked_and_verified(corpus: Path) -> None:
    dataset = Dataset.open(corpus / "dataset")
    (stream,) = dataset.streams("train")
    found = set(stream.read_mask(0, stream.tokens).tolist())
    assert found == {0, 1, 51, 8, 255, 131}
    assert dataset.manifest["format"] == 3
    assert list(find_problems(corpus / "dataset")) == []


def test_weights_are_refused_where_the_run_file_does_not_ask_for_them(
    corpus: Path, tmp_path: Path
) -> None:
    config = data_of(corpus, weights=False).model_copy(update={"folder": str(tmp_path / "other")})
    with pytest.raises(DataError, match=r"weight other than 0 and 1; .*data\.chat\.weights=true"):
        make(config)


def test_a_task_gets_weights_which_the_ledger_covers(corpus: Path) -> None:
    config = config_of({"model__vocab_size": 400}).model_copy(
        update={"data": data_of(corpus, weights=True)}
    )
    batches = TokenBatches(config, Dataset.open(corpus / "dataset"))
    read = batches.microbatch(1, 0)
    tensors = read.tensors
    assert set(tensors) == {"inputs", "targets", "documents", "weights"}
    assert int(tensors["targets"].max()) < 400
    assert bool(((tensors["weights"] > 0) == (tensors["targets"] >= 0)).all())
    assert float(tensors["weights"].sum()) == pytest.approx(read.tokens, rel=1e-6)
    assert batches.digest(read) == read.entries[0]["hash"]
    shown = DecoderTask(config).read_step(str(corpus / "dataset"), 1)[0]
    assert all(torch.equal(shown[name], tensors[name]) for name in shown)
    assert "weights" in shown
