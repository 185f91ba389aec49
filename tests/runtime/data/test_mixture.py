"""Weights of sources that change, sources that end, and the order for any number of workers."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from holdfast.config.sections.data import DataConfig
from holdfast.core.data.sample_order import NEVER
from holdfast.core.sharding.reduction_tree import deal
from holdfast.data.stream.coverage import describe_use
from holdfast.data.stream.dataset import Dataset
from holdfast.errors import DataError
from tests.support.chat import conversation, tokenizer_folder, write_rows
from tests.support.commands import apart, start, within, write_run_file
from tests.support.corpus import batches, data_config, make, text_folder, train_config

NAMES = ("web", "code", "notes")
WORLDS = (8, 3, 5, 7)
STEPS = 12
MIX = (
    {"from_step": 4, "weights": {"code": 5}},
    {"from_step": 8, "weights": {"web": 0, "notes": 3}},
)


def three_chats(root: Path, **more: Any) -> DataConfig:
    """Rows of chats, which are packed into samples, from three sources."""
    sources = []
    for number, name in enumerate(NAMES):
        rows = [{"messages": conversation(1000 * number + i, 1 + i % 3)} for i in range(150)]
        path = write_rows(root / f"{name}.jsonl", rows)
        source = {"kind": "jsonl", "path": str(path), "rows": "messages", "name": name}
        sources.append(source | more.pop(name, {}))
    defaults: dict[str, Any] = {
        "tokenizer": {"path": str(tokenizer_folder(root / "tokenizer"))},
        "attention": "document",
        "sequence_length": 200,
        "mix": MIX,
    }
    return data_config(root / "dataset", *sources, **defaults | more)


def fed_by_workers(dataset: Dataset, config: DataConfig) -> list[tuple[int, int, str]]:
    """(start, stop, hash) of what 8, 3, 5 and 7 workers feed, three steps each. Each worker
    builds its own order."""
    found = []
    for part, workers in enumerate(WORLDS):
        for worker in range(workers):
            own = batches(dataset, config, batch_size=20, microbatch_size=1)
            for step in range(3 * part + 1, 3 * part + 4):
                for index in deal(own.microbatches(step), workers)[worker]:
                    (entry,) = own.microbatch(step, index).entries
                    found.append((entry["start"], entry["stop"], entry["hash"]))
    return sorted(found)


@pytest.mark.parametrize("curriculum", [{}, {"by": "length", "window": 3}], ids=["none", "length"])
def test_the_order_is_the_same_for_8_3_5_and_7_workers(
    tmp_path: Path, curriculum: dict[str, Any]
) -> None:
    config = three_chats(tmp_path, curriculum=curriculum)
    dataset = make(config)
    reference = batches(dataset, config, batch_size=20, microbatch_size=1)
    samples = reference.schedule.position(STEPS + 1)
    expected = [(at, at + 1, reference.hash_of(at, at + 1)) for at in range(samples)]
    assert fed_by_workers(dataset, config) == expected

    # Each row once a pass, and each share exact to one sample in each part.
    fed = Counter[tuple[int, int, int]]()
    for source, epoch, sample in zip(*reference.order.places(0, samples), strict=True):
        packed = reference.packed[source]
        assert packed is not None
        for row in packed.sample(int(sample)).starts.tolist():
            fed[int(source), int(epoch), row] += 1
    assert set(fed.values()) == {1}
    assert max(epoch for _, epoch, _ in fed) > 0, "no source was passed twice"
    weights = [(1, 1, 1), (1, 5, 1), (0, 5, 3)]
    of_name = {name: number for number, name in enumerate(dataset.source_names)}
    edges = [0, 3 * 20, 7 * 20, samples]
    for (first, end), shares in zip(pairwise(edges), weights, strict=True):
        for name, share in zip(NAMES, shares, strict=True):
            counted = [reference.order.count_before(of_name[name], at) for at in (first, end)]
            assert abs(counted[1] - counted[0] - (end - first) * share / sum(shares)) < 1
    said = "\n".join(describe_use(dataset, config, train_config(20, 1, steps=STEPS)))
    assert "from step 4, sample 60" in said


@pytest.mark.parametrize("then", ["leave", "stop"])
def test_a_source_that_ends(tmp_path: Path, then: str) -> None:
    config = three_chats(tmp_path, mix=(), code={"at_end": then, "passes": 2, "weight": 3})
    dataset = make(config)
    made = batches(dataset, config, batch_size=20, microbatch_size=1)
    code = dataset.source_names.index("code")
    size = made.order.sizes[code]
    last = made.order.length if then == "stop" else 40 * size
    source, epoch, sample = made.order.places(0, last)
    mine = Counter(zip(epoch[source == code], sample[source == code], strict=True))
    assert mine == Counter((e, s) for e in (0, 1) for s in range(size))
    if then == "leave":
        assert made.order.length == NEVER
        (_, part) = made.order.parts
        assert source[part.start - 1] == code
        assert (
            np.bincount(source[part.start : part.start + 200], minlength=3).tolist().count(100) == 2
        )
        step = 1 + part.start // 20
        said = "\n".join(describe_use(dataset, config, train_config(20, 1, steps=step)))
        assert f"from step {step}, sample {part.start}, where code ends: " in said
    else:
        # The very next sample would be one that is not there.
        assert made.order.stopped_by == code
        with pytest.raises(DataError, match="end at sample"):
            made.order.places(0, last + 1)


@pytest.mark.slow
def test_a_killed_run_with_a_mixture_ends_with_its_source(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, documents=24)
    large = text_folder(tmp_path / "large", files=24, words=400)
    text = run_file.read_text().replace(
        f'    - {{kind: text, path: "{tmp_path}/texts"}}\n',
        f"""    - {{kind: text, path: "{tmp_path}/texts", name: small, at_end: stop}}
    - {{kind: text, path: "{large}", name: large, weight: 2}}
  mix:
    - {{from_step: 20, weights: {{small: 3}}}}
    - {{from_step: 60, weights: {{large: 7}}}}
""",
    )
    run_file.write_text(text)
    options = ("train.steps=100000", "checkpoint.every_steps=10", "train.evaluate.every=0")
    for workers, last in ((3, 30), (2, 70)):
        process = start("train", run_file, *options, f"layout.workers={workers}", "--json")
        assert process.stdout is not None
        for line in process.stdout:
            record = json.loads(line)
            if record["kind"] == "step_done" and record["event"]["step"] >= last:
                break
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    done = apart("train", run_file, *options, "layout.workers=1").succeeds()
    assert "data.sources.0.at_end: stop: source small ends" in done.err + done.out
    folder = tmp_path / "run"
    steps = json.loads((folder / "resolved.json").read_text())["config"]["train"]["steps"]
    assert 70 < steps < 100000
    audit = within("data", "audit", folder)
    assert (audit.code, f"{steps} steps: none missing, none twice" in audit.out) == (0, True), (
        audit.out
    )

    # A branch may change the weights after its step, and not before it.
    at = str(steps // 10 * 10)
    command = ("branch", folder, "--at", at, "--to", tmp_path / "branch")
    within(*command, "data.mix=[{from_step: 20, weights: {small: 4}}]").refuses_last(
        "other weights"
    )


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"mix": [{"from_step": 2, "weights": {"wed": 1}}]}, "mix.0.weights has wed"),
        ({"mix": [{"from_step": 2, "weights": {"web": -1}}]}, "negative"),
        ({"mix": [{"from_step": 2, "weights": dict.fromkeys(NAMES, 0)}]}, "all 0"),
        ({"mix": [MIX[1], MIX[0]]}, "mix.1.from_step 4"),
        ({"web": {"passes": 2}}, "passes"),
    ],
)
def test_a_mixture_that_means_nothing_is_refused(
    tmp_path: Path, changed: dict[str, Any], place: str
) -> None:
    with pytest.raises(ValueError, match=place):
        three_chats(tmp_path, **changed)


def test_weights_of_too_many_digits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"mix\.0\.weights have too many digits"):
        three_chats(tmp_path, mix=[{"from_step": 2, "weights": {"web": 0.123456789}}])
