"""Every layout that cannot work is refused before anything starts: one sentence, exit code 2, and
not a byte written, by `train` and by `layout show` alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import LayoutError
from holdfast.layout import Replica, Topology
from tests.runtime.cli.test_bad_input import tree
from tests.support.commands import here, write_run_file

Capture = pytest.CaptureFixture[str]

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
UNLIKE = "layout.replicas=[{pp: 3}, {pp: 2}]"


@pytest.mark.parametrize("command", [("train",), ("layout", "show")])
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["layout.tp=5"], ["layout.tp 5 does not divide model.heads 12", "use 4"]),
        (["layout.tp=6"], ["layout.tp 6 neither divides model.kv_heads 4", "use 4"]),
        (
            ["layout.tp=3", "model.kv_heads=3", "model.ffn_dim=16"],
            ["layout.tp 3 does not divide model.ffn_dim 16", "use 1"],
        ),
        (["layout.pp=5"], ["layout.pp 5 is more than model.layers 4", "use 4 or less"]),
        (["layout.pp=2", "layout.stages=[4]"], ["has 1 of layout.pp 2 stages", "[2, 2]"]),
        (["layout.pp=2", "layout.stages=[4, 4]"], ["8 blocks, but model.layers is 4", "[2, 2]"]),
        (["layout.pp=2", "layout.stages=[4, 0]"], ["layout.stages.1 is 0", "at least 1"]),
        (["layout.dp_shard=3"], ["layout.dp_shard 3 does not divide", "dp_shard 2 or 4"]),
        (["layout.dp_shard=0"], ["layout.dp_shard is 0", "at least 1"]),
        (["layout.zero=0"], ["layout.zero is 0, not one of 1, 2, 3"]),
        (["layout.schedule=zb"], ["layout.schedule is 'zb', not one of 1f1b, gpipe, interl"]),
        (
            ["layout.pp=2", "layout.tp=2", "layout.workers=6"],
            ["layout.workers 6 is not a multiple of layout.pp 2 x layout.tp 2", "use 4 or 8"],
        ),
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
        ([UNLIKE, "layout.workers=4"], ["layout.workers 4 is not the 5", "use 5, or 0"]),
        ([UNLIKE, "layout.pp=2"], ["layout.pp is given beside layout.replicas"]),
        (
            ["layout.replicas=[{pp: 3}, {tp: 5}]"],
            ["layout.replicas.1.tp 5 does not divide model.heads 12", "use 4"],
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
    capsys: Capture,
) -> None:
    run_file = write_run_file(tmp_path)
    before = tree(tmp_path)
    here(capsys, *command, run_file, *SHAPE, *overrides).refuses(*words)
    assert tree(tmp_path) == before


def test_the_line_of_the_run_file_is_named(tmp_path: Path, capsys: Capture) -> None:
    run_file = write_run_file(tmp_path)
    text = run_file.read_text().replace("{workers: 2}", "{workers: 9}")
    run_file.write_text(text)
    line = text.split("\n").index("layout: {workers: 9}") + 1
    here(capsys, "train", run_file).refuses(
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
