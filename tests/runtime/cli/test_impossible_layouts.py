"""Every layout that cannot work is refused before anything starts: one sentence, exit code 2, and
not a byte written, by `train` and by `layout show` alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import LayoutError
from holdfast.layout import Replica, Topology
from tests.runtime.cli.test_bad_input import tree
from tests.support.commands import within, write_run_file

# 4 blocks, 12 heads, 4 key/value heads; 6 microbatches of 4 samples a step.
SHAPE = (
    "model.layers=4",
    "model.dim=24",
    "model.heads=12",
    "model.kv_heads=4",
    "model.ffn_dim=24",
    "train.batch_size=24",
    "train.microbatch_size=4",
    "layout.workers=0",
)


@pytest.mark.parametrize("command", [("train",), ("layout", "show")])
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["layout.tp=5"], ["layout.tp 5 does not divide model.heads 12", "use 4"]),
        (
            ["layout.workers=7"],
            ["layout.workers 7 make 7 replicas, but step 1 has 6 microbatches", "use 6 workers"],
        ),
        (
            ["layout.workers=4", "train.batch_warmup=[{from_step: 2, batch_size: 4}]"],
            ["step 2 has 1 microbatch of", "use 1 worker or fewer"],
        ),
        (
            ["layout.pp=4", "layout.workers=8"],
            [
                "layout.pp 4 under 1f1b needs 4 microbatches a replica",
                "replica 0 gets 3",
                "layout.schedule=gpipe",
                "layout.workers 4",
            ],
        ),
        (
            ["layout.replicas=[{pp: 4}, {pp: 2}]", "train.batch_size=20"],
            ["layout.replicas.0.pp 4 under 1f1b needs 4", "layout.replicas.0.pp 2"],
        ),
    ],
)
def test_refused_before_anything_starts(
    overrides: list[str],
    words: list[str],
    command: tuple[str, ...],
    tmp_path: Path,
) -> None:
    run_file = write_run_file(tmp_path)
    before = tree(tmp_path)
    within(*command, run_file, *SHAPE, *overrides).refuses(*words)
    assert tree(tmp_path) == before


def test_the_line_of_the_run_file_is_named(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    text = run_file.read_text().replace("{workers: 2}", "{workers: 9}")
    run_file.write_text(text)
    line = text.split("\n").index("layout: {workers: 9}") + 1
    within("train", run_file).refuses(
        f"run.yaml:{line}: layout.workers 9 make 9 replicas, but step 1 has 4 microbatches",
        "use 4 workers or fewer",
    )


@pytest.mark.parametrize(
    ("replicas", "sentence"),
    [
        ([(0, 1), (1, 2)], "topology: rank 1 stands twice, in replica 0 and in replica 1; "),
        ([(0, 0)], "topology: rank 0 stands twice, in replica 0; "),
        ([(0, 2)], "topology: ranks [1] are missing; "),
    ],
)
def test_a_topology_with_a_rank_twice_or_missing(
    replicas: list[tuple[int, ...]], sentence: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        Topology(
            1,
            tuple(Replica(i, ranks, (1, 2, 1, 1)) for i, ranks in enumerate(replicas)),
            ("here",) * sum(map(len, replicas)),
        )
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
