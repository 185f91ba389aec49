"""Training on packed chat data: loss and weight count the trained tokens alone, under each layout.

Rows are packed into samples, and most targets carry no loss. One microbatch of each step carries
none at all, and the third step has nothing but such microbatches.
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
from holdfast.training.engine.engine import StepEngine
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


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("chat"), message_rows(80))


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


def check_curve(name: str, corpus: Path, folder: Path, **chat: Any) -> None:
    """Losses, norms, weights and the last state are those of one process."""
    expected, state = alone(corpus, **chat)
    of, arguments = (
        case(f"shallow.{name}"),
        {"name": f"shallow.{name}", "root": str(corpus), **chat},
    )
    for value in rank_values(body, of.world_size, arguments, folder=folder, deadline=240):
        for key in ("losses", "norms", "tokens"):
            np.testing.assert_allclose(value[key], expected[key], rtol=1e-10, atol=0)
    assert_all_state(state, [folder / f"{rank}.npz" for rank in range(of.world_size)], 1e-10)


@pytest.mark.parametrize(
    "name",
    ["pp2-tp2", "zero1.2", *map(in_campaign, ("dp2-shard2", "zero2.2", "tp2", "pp2-shard2"))],
)
def test_each_layout_gives_the_curve_of_one_process(
    name: str, corpus: Path, tmp_path: Path
) -> None:
    expected, _ = alone(corpus)
    assert expected["tokens"][EMPTY_STEP - 1] == 0
    assert expected["losses"][EMPTY_STEP - 1] == 0
    assert np.isfinite(expected["losses"]).all()
    check_curve(name, corpus, tmp_path)


def test_replicas_are_bit_equal(corpus: Path) -> None:
    expected, _ = alone(corpus)
    arguments = {"name": "shallow.dp2", "root": str(corpus)}
    for value in rank_values(body, 2, arguments, deadline=240):
        assert value == expected


def test_the_loss_of_packed_rows_is_that_of_each_row_alone(corpus: Path) -> None:
    """In plain torch: one row at a time, without padding, masks by hand."""
    expected, _ = alone(corpus)
    (value,) = rank_values(reference, 1, {"root": str(corpus)}, deadline=240)
    assert value["tokens"] == expected["tokens"][0]
    assert abs(value["loss"] - expected["losses"][0]) < 1e-10


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
