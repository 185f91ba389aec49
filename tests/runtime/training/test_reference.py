"""Reference log-probabilities: computed once by all ranks, stored, shared, and read."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from holdfast.data.stream import reference
from holdfast.data.stream.batch import MASKED_TARGET, Batches
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.verify import find_problems
from holdfast.errors import DataError
from holdfast.events import ReferenceProgress
from holdfast.model.decoder import Decoder
from holdfast.model.init import initialise
from holdfast.training.engine.build import make_session
from holdfast.training.engine.reference import fill_reference
from holdfast.training.engine.task import DecoderTask
from tests.runtime.data.test_preferences import config_of as data_of
from tests.runtime.data.test_preferences import pairs
from tests.support.corpus import make
from tests.support.layouts import case, config_of, engine_of, topology_of
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import CPU

KEY = "made"


def run_config(root: Path, folder: str, **changes: Any) -> Any:
    data = data_of(root, pairs(30), validation_fraction=0.1).model_dump(mode="json")
    data["folder"] = str(root / folder)
    given = {f"data__{key}": value for key, value in data.items()}
    given |= {"objective__kind": "dpo", "objective__reference": {"key": KEY}}
    return config_of(given | {"model__vocab_size": 400, **changes})


def fill(
    rank: RankContext,
    name: str,
    root: Path,
    folders: list[str],
    step: int = 0,
    changed: bool = False,
) -> dict[str, Any]:
    """Fill the reference of the rank's node. folders: of the dataset, by rank; each is of a node.
    changed: the weights are not those that the run began with."""
    torch.set_num_threads(1)
    reference.PIECE_TOKENS = 700  # two samples
    config = run_config(root, folders[rank.rank], **case(name).changes)
    dataset = Dataset.open(config.data.folder)
    batches = Batches(dataset, config.data, config.train, config.seed, reference=KEY)
    topology = replace(topology_of(case(name), config), nodes=tuple(folders))
    task = DecoderTask(config)
    made = engine_of(config, topology, rank.rank, rank.store("run"), task=task)
    if changed:
        with torch.no_grad():
            for tensor in made.parameters.master_tensors:
                tensor.add_(1.0)
        made.parameters.refresh()
    before = [tensor.clone() for tensor in made.parameters.master_tensors]
    session = make_session(config, made, batches, CPU, task)
    events: list[ReferenceProgress] = []
    fill_reference(session, step, events.append, lambda: None)
    after = made.parameters.master_tensors
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not made.status.is_torn
    assert session.evaluator.run() is not None
    made.close()
    return {"done": [event.done for event in events], "digest": [e.digest for e in events][-1:]}


def values_of(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {path.name: np.fromfile(path, "u1") for path in sorted(folder.glob("piece-*"))}


@pytest.mark.parametrize("name", ["dp2", *map(in_campaign, ("pp2-tp2", "shard2", "zero1.2"))])
def test_ranks_together_compute_what_the_reference_says(tmp_path: Path, name: str) -> None:
    dataset = make(run_config(tmp_path, "dataset").data)
    size = case(name).world_size
    arguments: dict[str, Any] = {"root": tmp_path, "folders": ["dataset"] * size}
    first, *_ = rank_values(fill, size, {**arguments, "name": name})
    assert first["done"][0] == 0
    assert find_problems(dataset) == []
    reference.PIECE_TOKENS, before = 700, reference.PIECE_TOKENS
    try:
        config = run_config(tmp_path, "dataset")
        batches = Batches(dataset, config.data, config.train, config.seed, reference=KEY)
    finally:
        reference.PIECE_TOKENS = before
    assert batches.reference is not None
    assert batches.reference.is_complete
    decoder = Decoder(config.model).to_empty(device="cpu").double()
    initialise(decoder, config.seed)
    (samples,) = batches.order.sizes
    for found in (batches.read_samples(0, samples), *batches.validation(99).microbatches):
        with torch.no_grad():
            inputs, documents = torch.from_numpy(found.inputs), torch.from_numpy(found.documents)
            logits = decoder(inputs, documents)
        targets = torch.from_numpy(found.targets)
        chosen = F.log_softmax(logits, -1).gather(2, targets.clamp_min(0)[..., None])[..., 0]
        want = chosen.masked_fill(targets == MASKED_TARGET, 0.0).numpy()
        np.testing.assert_allclose(found.side["reference"], want, rtol=1e-6, atol=1e-6)
        assert (want < 0).any()


def test_what_a_kill_left_is_completed_and_the_state_stays(tmp_path: Path) -> None:
    dataset = make(run_config(tmp_path, "dataset").data)
    arguments: dict[str, Any] = {"name": "one", "root": tmp_path, "folders": ["dataset"]}
    (first,) = rank_values(fill, 1, arguments)
    folder = reference.reference_folder(dataset, KEY)
    stored = values_of(folder)
    assert len(stored) > 3
    # The same run again computes nothing.
    (again,) = rank_values(fill, 1, arguments)
    assert again == {"done": [len(stored)], "digest": first["digest"]}
    # A killed run left a damaged piece and none of another; the weights have moved on since.
    (folder / reference.MANIFEST).unlink()
    (folder / "piece-00001").unlink()
    damaged = folder / "piece-00002"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    (resumed,) = rank_values(fill, 1, {**arguments, "step": 3, "changed": True})
    assert resumed == {"done": [len(stored) - 2, len(stored)], "digest": first["digest"]}
    assert {k: v.tobytes() for k, v in values_of(folder).items()} == {
        k: v.tobytes() for k, v in stored.items()
    }
    # A complete set is verified, and named if a byte has changed.
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    assert any("piece-00002" in problem for problem in find_problems(dataset))


def test_a_node_gets_the_stored_bits_of_another(tmp_path: Path) -> None:
    here = make(run_config(tmp_path, "a").data)
    arguments: dict[str, Any] = {"root": tmp_path, "folders": ["a"]}
    (first,) = rank_values(fill, 1, {**arguments, "name": "one"})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    there = Dataset.open(tmp_path / "b")
    folders = [reference.reference_folder(one, KEY) for one in (here, there)]
    shutil.rmtree(folders[1])
    both = {"root": tmp_path, "folders": ["a", "b"], "name": "dp2", "step": 5, "changed": True}
    got, _ = rank_values(fill, 2, both)
    assert got == {"done": [], "digest": []}, "nothing is computed"
    assert [v.tobytes() for v in values_of(folders[0]).values()] == [
        v.tobytes() for v in values_of(folders[1]).values()
    ]
    assert first["digest"]


def test_values_are_no_numbers_before_they_are_there(tmp_path: Path) -> None:
    config = run_config(tmp_path, "dataset")
    dataset = make(config.data)
    batches = Batches(dataset, config.data, config.train, config.seed, reference=KEY)
    found = batches.read_samples(0, 1)
    assert np.isnan(found.side["reference"]).all()
    assert not batches.blank_microbatch(1).side["reference"].any()
    batches.read_reference()
    with pytest.raises(DataError, match="reference log-probabilities cannot be read"):
        batches.read_samples(0, 1)
