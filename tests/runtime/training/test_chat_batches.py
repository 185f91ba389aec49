"""Training on packed chat data: loss and weight count the trained tokens alone, under each layout.

Rows are packed into samples, and most targets carry no loss. One microbatch of each step carries
none at all, and the third step has nothing but such microbatches. Messages may have weights of
hundredths: then the loss is a weighted sum over the sum of the weights.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.data.stream.batch import MASKED_TARGET, Batches
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.loader import TensorMicrobatch
from holdfast.data.stream.verify import find_problems
from holdfast.errors import DataError
from holdfast.tasks.task.batches import TokenBatches
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.task import DecoderTask
from holdfast.training.engine.vote import StepVerdict
from tests.support.chat import message_rows, tokenizer_folder, write_rows
from tests.support.corpus import data_config, make
from tests.support.layouts import (
    assert_all_state,
    case,
    config_of,
    engine_for,
    load_complete,
    pieces,
    save_pieces,
)
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import digest

STEPS, EMPTY_STEP, EMPTY_LEAF = 4, 3, 1
LENGTH = 96


WEIGHTS = (1, 0.5, 0.07, 2.54, 0, None, 1.3)
Corpora = dict[bool, Path]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    """By whether replies have weights."""
    plain, weighted = message_rows(80), message_rows(80)
    replies = [m for row in weighted for m in row["messages"] if m["role"] == "assistant"]
    for number, reply in enumerate(replies):
        reply["weight"] = WEIGHTS[number % len(WEIGHTS)]
    return {
        False: prepared(tmp_path_factory.mktemp("chat"), plain),
        True: prepared(tmp_path_factory.mktemp("weighted"), weighted, weights=True),
    }


def prepared(root: Path, rows: list[dict[str, Any]], **chat: Any) -> Path:
    """A prepared dataset, and the rows and tokenizer of it."""
    tokenizer_folder(root / "tokenizer")
    write_rows(root / "rows.jsonl", rows)
    make(data_of(root, **chat))
    return root


def data_of(root: Path, **chat: Any) -> Any:
    return data_config(
        root / "dataset",
        {"kind": "jsonl", "path": str(root / "rows.jsonl"), "rows": "messages"},
        tokenizer={"path": str(root / "tokenizer")},
        attention="document",
        sequence_length=LENGTH,
        validation_fraction=0,
        chat=chat,
    )


def begun(rank: RankContext, name: str, root: str, **chat: Any) -> tuple[StepEngine, Batches]:
    changes = {"model__vocab_size": 400, "train__steps": STEPS, "data__chat": chat}
    config = config_of({**case(name).changes, "data__sequence_length": LENGTH, **changes})
    data = data_of(Path(root), **chat)
    batches = Batches(Dataset.open(f"{root}/dataset"), data, config.train, config.seed)
    return engine_for(rank, name, config), batches


def one_step(made: StepEngine, batches: Batches, step: int, has_empty: bool) -> StepVerdict:
    shard, shards = made.groups.coordinate.dp_shard, made.groups.degree("dp_shard")
    fed = []
    for leaf in made.begin(step):
        given = batches.microbatch(step, leaf, shard, shards)
        targets, tokens = given.targets, given.tokens
        if has_empty and (leaf == EMPTY_LEAF or step == EMPTY_STEP):
            targets, tokens = np.full_like(targets, MASKED_TARGET), 0
        assert given.documents is not None
        arrays = map(torch.from_numpy, (given.inputs, targets, given.documents))
        fed.append(TensorMicrobatch(*arrays, given.entries, tokens))
    made.compute(fed)
    verdict = made.reduce()
    made.apply(verdict)
    return verdict


def body(rank: RankContext, name: str, root: str, **chat: Any) -> dict[str, Any]:
    """Train. Without weights some microbatches carry no loss."""
    made, batches = begun(rank, name, root, **chat)
    verdicts = [one_step(made, batches, step, not chat) for step in range(1, STEPS + 1)]
    save_pieces(rank.folder / f"{rank.rank}.npz", pieces(made))
    out = {
        "losses": [v.mean_loss for v in verdicts],
        "norms": [v.mean_norm for v in verdicts],
        "tokens": [v.tokens for v in verdicts],
        "digest": digest(made),
    }
    made.close()
    return out


@cache
def alone(root: Path, **chat: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    (folder := root / "alone").mkdir()
    arguments = {"name": "shallow.one", "root": str(root), **chat}
    (value,) = rank_values(body, 1, arguments, folder=folder)
    return value, load_complete(folder / "0.npz")


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *(("pp2-tp2", False), ("zero1.2", False)),
        *(in_campaign(n, False) for n in ("dp2-shard2", "zero2.2", "tp2", "pp2-shard2")),
        *(in_campaign(n, True) for n in ("pp2-tp2", "zero1.2", "shard2", "tp2")),
    ],
)
def test_each_layout_gives_the_curve_of_one_process(
    name: str, weights: bool, corpora: Corpora, tmp_path: Path
) -> None:
    """Losses, norms, weights and the last state."""
    chat = {"weights": True} if weights else {}
    expected, state = alone(corpora[weights], **chat)
    if not weights:
        assert expected["tokens"][EMPTY_STEP - 1] == 0
        assert expected["losses"][EMPTY_STEP - 1] == 0
        assert np.isfinite(expected["losses"]).all()
    size = case(name).world_size
    arguments = {"name": f"shallow.{name}", "root": str(corpora[weights]), **chat}
    for value in rank_values(body, size, arguments, folder=tmp_path, deadline=240):
        for key in ("losses", "norms", "tokens"):
            np.testing.assert_allclose(value[key], expected[key], rtol=1e-10, atol=0)
    assert_all_state(state, [tmp_path / f"{rank}.npz" for rank in range(size)], 1e-10)


@pytest.mark.parametrize(
    ("name", "weights"), [("dp2", False), ("dp2", True), in_campaign("dp3", True)]
)
def test_replicas_are_bit_equal(name: str, weights: bool, corpora: Corpora) -> None:
    chat = {"weights": True} if weights else {}
    expected, _ = alone(corpora[weights], **chat)
    assert weights == any(weight % 1 for weight in expected["tokens"])
    arguments = {"name": f"shallow.{name}", "root": str(corpora[weights]), **chat}
    for value in rank_values(body, case(name).world_size, arguments, deadline=240):
        assert value == expected


@pytest.mark.parametrize(("weights", "within"), [(False, 1e-10), (True, 1e-7)])
def test_the_loss_of_packed_rows_is_that_of_each_row_alone(
    weights: bool, within: float, corpora: Corpora
) -> None:
    """In plain torch: one row at a time, without padding, masks and weights by hand."""
    chat = {"weights": True} if weights else {}
    expected, _ = alone(corpora[weights], **chat)
    arguments = {"root": str(corpora[weights]), **chat}
    (value,) = rank_values(reference, 1, arguments, deadline=240)
    assert value["tokens"] == pytest.approx(expected["tokens"][0], rel=within)
    assert value["loss"] == pytest.approx(expected["losses"][0], rel=within)


def reference(rank: RankContext, root: str, **chat: Any) -> dict[str, Any]:
    """Mean loss of the first step's rows, with initial weights. Weights of tokens are worked out
    from the bytes of the mask."""
    made, batches = begun(rank, "shallow.one", root, **chat)
    decoder = made.objective.decoder
    total, tokens = 0.0, 0.0
    for leaf in set(range(batches.microbatches(1))) - (set() if chat else {EMPTY_LEAF}):
        packed = batches.packed[0]
        assert packed is not None
        _, _, samples = batches.order.places(*batches.positions(1, leaf))
        for sample in samples.tolist():
            one = packed.sample(sample)
            stops = np.flatnonzero(one.ends) + 1
            for start, stop in zip([0, *stops[:-1].tolist()], stops.tolist(), strict=True):
                ids = torch.from_numpy(one.tokens[start:stop].astype(np.int64))
                carried = one.mask[start + 1 : stop].tolist()
                weights = [1.0 if byte == 1 else max(byte - 1, 0) / 100 for byte in carried]
                with torch.no_grad():
                    scores = decoder(ids[None])[0, :-1].log_softmax(-1)
                nats = -scores.gather(1, ids[1:, None])[:, 0]
                total += float((nats * torch.tensor(weights, dtype=torch.float64)).sum())
                tokens += sum(weights)
    made.close()
    return {"loss": total / tokens, "tokens": tokens}


def test_a_dataset_with_weights_is_marked_and_verified(corpora: Corpora) -> None:
    dataset = Dataset.open(corpora[True] / "dataset")
    (stream,) = dataset.streams("train")
    found = set(stream.read_mask(0, stream.tokens).tolist())
    assert found == {0, 1, 51, 8, 255, 131}
    assert dataset.manifest["format"] == 3
    assert list(find_problems(corpora[True] / "dataset")) == []


def test_weights_are_refused_where_the_run_file_does_not_ask_for_them(
    corpora: Corpora, tmp_path: Path
) -> None:
    config = data_of(corpora[True], weights=False).model_copy(
        update={"folder": str(tmp_path / "other")}
    )
    with pytest.raises(DataError, match=r"weight other than 0 and 1; .*data\.chat\.weights=true"):
        make(config)


def test_a_task_gets_weights_which_the_ledger_covers(corpora: Corpora) -> None:
    config = config_of({"model__vocab_size": 400}).model_copy(
        update={"data": data_of(corpora[True], weights=True)}
    )
    batches = TokenBatches(config, Dataset.open(corpora[True] / "dataset"))
    read = batches.microbatch(1, 0)
    tensors = read.tensors
    assert set(tensors) == {"inputs", "targets", "documents", "weights"}
    assert int(tensors["targets"].max()) < 400
    assert bool(((tensors["weights"] > 0) == (tensors["targets"] >= 0)).all())
    assert float(tensors["weights"].sum()) == pytest.approx(read.tokens, rel=1e-6)
    assert batches.digest(read) == read.entries[0]["hash"]
    shown = DecoderTask(config).read_step(str(corpora[True] / "dataset"), 1)[0]
    assert all(torch.equal(shown[name], tensors[name]) for name in shown)
    assert "weights" in shown
