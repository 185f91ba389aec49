"""`holdfast layout show`: ranks, nodes, shares and a loss, as a person and a program read them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.plan.placing.domains import ASSUMED_LINKS
from holdfast.show.layout_distance import USUAL_DEVICES
from tests.support.commands import within, write_run_file

EIGHT = (
    "model.layers=4",
    "model.kv_heads=2",
    "model.vocab_size=64",
    "train.batch_size=8",
    "train.microbatch_size=2",
    "layout.pp=2",
    "layout.tp=2",
    "layout.workers=8",
)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run_file(tmp_path)


def rows(out: str) -> list[list[str]]:
    """The table with one row a rank, cells split where two blanks are."""
    lines = out[out.index("\nrank ") + 1 :].split("\n")
    table = [re.split(r" {2,}", line.rstrip()) for line in lines]
    return [row for row in table if row[0].isdigit()][:8]


def test_which_rank_holds_what_on_which_node(run_file: Path) -> None:
    outcome = within("layout", "show", run_file, *EIGHT, "--nodes", "left,right")
    assert (outcome.code, outcome.err) == (0, "")
    assert "8 ranks on 2 nodes, 2 replicas; sequence parallel on; schedule 1f1b" in outcome.out
    assert "replica 1: pp 2 x tp 2, blocks [2, 2]" in outcome.out
    grid = outcome.out[outcome.out.index("replica 1:") :].split("\n")[1:4]
    assert [re.split(r" {2,}", line.strip()) for line in grid] == [
        ["tp 0", "tp 1"],
        ["stage 0", "4 on right", "5 on right"],
        ["stage 1", "6 on right", "7 on right"],
    ]
    table = rows(outcome.out)
    assert len(table) == 8
    # rank, node, replica, pp, tp, holds, heads, kv heads, vocabulary, bytes ...
    assert table[1][:9] == ["1", "left", "0", "0", "1", "embedding, blocks 0-1", "1", "1", "32-63"]
    assert table[6][:9] == ["6", "right", "1", "1", "0", "blocks 2-3, norm, head", "0", "0", "0-31"]
    assert "\nreplica  4 microbatches a step\n0        0-1 (2)\n1        2-3 (2)\n" in outcome.out
    kept = re.search(
        r"activations kept .* on rank 0 \(microbatches in flight 2, each ", outcome.out
    )
    assert kept is not None
    estimate = outcome.out[outcome.out.index("estimate of each rank") :].split("\n")
    assert estimate[1].split()[:3] == ["rank", "parameters", "gradients"]
    assert [line.split()[0] for line in estimate[2:10]] == list("01234567")
    assert "no fragmentation is added on a CPU" in estimate[10]


def test_schedules_and_experts_have_activations(run_file: Path) -> None:
    """ZBV keeps 2 p stages of microbatches. Experts are said to have an even load."""
    zbv = ("layout.workers=2", "layout.pp=2", "layout.schedule=zbv", "model.layers=4")
    more = ("model.vocab_size=64", "train.batch_size=16", "train.microbatch_size=2")
    out = within("layout", "show", run_file, *zbv, *more).out
    assert "(stages of microbatches in flight 4, each " in out
    assert "estimate of each rank's memory" in out
    experts = ("model.family=mixtral", "model.experts={count: 4}", *more)
    out = within("layout", "show", run_file, *experts).out
    assert "activations kept for the backward, at most: " in out
    assert "experts: each with as many tokens as any other" in out
    spread = ("layout.workers=2", "layout.dp_shard=2", "layout.ep=2")
    out = within("layout", "show", run_file, *experts, *spread).out
    assert "no estimate of each rank's memory with layout.ep" in out


def test_components_of_a_lower_degree_say_who_computes_what(run_file: Path) -> None:
    more = ("model.heads=6", "model.head_dim=4", "model.kv_heads=2", "train.batch_size=8")
    tp = ("layout.tp=4", "layout.tp_by.attention=2", "layout.workers=4")
    words = (*more, *tp, "model.vocab_size=64", "train.microbatch_size=2")
    out = within("layout", "show", run_file, *words).out
    assert [row[5:7] for row in rows(out)[:4]] == [["0-2", "0"], ["3-5", "1"]] * 2
    (line,) = [line for line in out.split("\n") if "  attention  " in line]
    found = re.split(r" {2,}", line)
    assert found[1:5] == ["attention", "2", "0-1, 2-3", "1 of 2 samples"]
    sent, usual = (int(n.replace(",", "")) for n in found[5].split(" of "))
    assert 3 * sent == usual
    out = within("layout", "show", run_file, *words[:-1], "train.microbatch_size=1").out
    assert "0 of 1 sample" in out
    assert "what has 0 samples computes one for nothing: raise train.microbatch_size" in out


def test_activations_fall_with_the_ranks_that_share_tokens(run_file: Path) -> None:
    """By 1 / cp, but for the gradient of the head's rows, which the loss computes at once."""
    kept = []
    for cp in (1, 2, 4):
        layout = (f"layout.cp={cp}", f"layout.workers={cp}", "layout.cp_method=ring")
        wide = ("model.vocab_size=64", "train.microbatch_size=8", "train.batch_size=8")
        out = within("layout", "show", run_file, *wide, *layout, "--json").out
        ranks = json.loads(out)["ranks"]
        assert [rank["at"]["cp"] for rank in ranks] == list(range(cp))
        kept.append(ranks[0]["activations"]["per_microbatch"])
    assert kept[0] - kept[1] == 2 * (kept[1] - kept[2])
    assert kept[0] > 3.5 * kept[2]


def test_what_a_lost_rank_leaves(run_file: Path) -> None:
    out = within("layout", "show", run_file, *EIGHT, "--what-if", "lost=3").out
    assert "replica 0: pp 2 x tp 2, blocks [2, 2] (broken)" in out
    assert "replica 1: pp 2 x tp 2, blocks [2, 2] (whole)" in out
    assert "3 on " in out
    assert out.count(" LOST") == 1
    assert "broken      replica 0; alive in there, without work: 0, 1, 2" in out
    assert "whole       replica 1, to be dealt all microbatches" in out
    assert "have a copy in a whole replica" in out
    dealt = re.findall(r"^([01])  +(\S+ \(\d\)|none)  +(\S+ \(\d\)|none)$", out, re.MULTILINE)
    assert dealt == [("0", "0-1 (2)", "none"), ("1", "2-3 (2)", "0-3 (4)")]


def test_a_lost_node_can_take_state_along(run_file: Path) -> None:
    arguments = ("layout", "show", run_file, *EIGHT[:-1], "--workers", "4")
    out = within(*arguments, "--nodes", "a,b", "--what-if", "lost=node:b").out
    assert "without ranks 2, 3:" in out
    assert "whole       no replica" in out
    assert re.search(r"have no copy left outside the lost ranks: blocks 2-3, norm and head\n", out)
    assert "those are in a checkpoint only" in out


def test_as_json(run_file: Path) -> None:
    arguments = ("layout", "show", run_file, *EIGHT, "--ranks-per-node", "4")
    outcome = within(*arguments, "--what-if", "lost=0,5", "--json")
    value = json.loads(outcome.out)
    assert value["topology"]["replicas"][1]["stages"] == [2, 2]
    assert value["topology"]["nodes"] == ["node0"] * 4 + ["node1"] * 4
    assert [rank["at"]["pp"] for rank in value["ranks"]] == [0, 0, 1, 1] * 2
    held = value["ranks"][0]["held"]
    assert held["total"] == held["parameters"] + held["gradients"] + held["moments"]
    estimate = value["ranks"][0]["estimate"]
    parts = [part for key, part in estimate.items() if key not in ("peak", "moment")]
    assert estimate["peak"] == sum(parts) > held["total"]
    assert value["microbatches"] == [{"from_step": 1, "number": 4, "shares": [[0, 1], [2, 3]]}]
    assert (value["what_if"]["lost"], value["what_if"]["broken"]) == ([0, 5], [0, 1])
    assert value["what_if"]["waiting"] == [1, 2, 3, 4, 6, 7]
    assert value["what_if"]["gone"] == 0, "0 and 5 hold different halves"


def test_what_is_not_known_is_said(run_file: Path) -> None:
    outcome = within("layout", "show", run_file, "layout.workers=0")
    assert outcome.code == 0
    assert "shown for 1; see --workers" in outcome.err
    assert "add model.vocab_size=N" in outcome.err
    assert "vocabulary not known yet" in outcome.out
    assert "an estimate of each rank's memory needs model.vocab_size=N" in outcome.out


def test_a_run_on_devices_says_how_many_communicators_each_rank_has(run_file: Path) -> None:
    arguments = ("layout", "show", run_file, *EIGHT)
    assert "communicators" not in within(*arguments).out
    outcome = within(*arguments, "device=cuda")
    said = outcome.out[outcome.out.index("communicators of the device's backend") :].split("\n")
    assert "not in the peak" in said[0]
    assert "not measured here" in said[0]
    # The axes pp and tp, two pipes, and two sets of ranks that sum gradients together.
    assert said[2].split()[:2] == ["0", "6"]
    value = json.loads(within(*arguments, "device=cuda", "--json").out)
    found = value["ranks"][0]["communicators"]
    assert found == {"groups": 6, "bytes": 6 * 688_000_000}
    value = json.loads(within(*arguments, "--json").out)
    assert value["ranks"][0]["communicators"] == {"groups": 0, "bytes": 0}


def test_batch_warm_up_has_a_column_of_its_own(run_file: Path) -> None:
    warm = "train.batch_warmup=[{from_step: 3, batch_size: 6}]"
    out = within("layout", "show", run_file, warm).out
    assert re.search(r"\n0 +0-1 \(2\) +0-2 \(3\)\n1 +2-3 \(2\) +3-5 \(3\)\n", out), out
    assert "6 microbatches a step from step 3 on" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--what-if", "lost=9"], ["--what-if", "rank 9 is not in a world of 2", "ranks 0 to 1"]),
        (["--what-if", "lost=-1"], ["--what-if lost=-1", "write lost=3"]),
        (["--what-if", "lost="], ["write lost=3, lost=3,5 or lost=node:a"]),
        (["--what-if", "gone=1"], ["write lost=3"]),
        (["--nodes", "a,b", "--what-if", "lost=node:c"], ["no node 'c'", "use one of a, b"]),
        (["--nodes", "a,a"], ["--nodes", "not a list of different names"]),
        (["--nodes", "a,b,c"], ["3 nodes are more than 2 ranks", "name 2 or fewer"]),
        (
            ["--nodes", "a", "--ranks-per-node", "1"],
            ["1 node of 1 rank cannot hold 2", "use 2, or name 2 nodes"],
        ),
        (
            ["--nodes", "a,b", "--ranks-per-node", "4"],
            [
                "--nodes",
                "2 ranks, 4 on a node, leave b without one",
                "name 1 node, or leave out --ranks-per-node",
            ],
        ),
        (["--ranks-per-node", "0"], ["--ranks-per-node"]),
        (["--workers", "0"], ["--workers"]),
    ],
)
def test_refusals(arguments: list[str], words: list[str], run_file: Path) -> None:
    within("layout", "show", run_file, *arguments).refuses(*words)


def test_a_thousand_ranks_need_no_torch(run_file: Path) -> None:
    """Drawn in a fresh interpreter, in which torch is not loaded afterwards."""
    code = (
        "import sys\nfrom holdfast.cli.main import main\n"
        "code = main(sys.argv[1:])\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    big = ("model.layers=4", "model.heads=4", "model.kv_heads=4", "train.batch_size=1024")
    big += ("train.microbatch_size=2", "layout.pp=4", "layout.dp_shard=2", "layout.tp=4")
    big += ("model.vocab_size=64", "layout.workers=1024")
    done = subprocess.run(
        [sys.executable, "-c", code, "layout", "show", str(run_file), *big, "--what-if", "lost=3"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1,024 ranks on 1 node, 32 replicas" in done.stdout


@pytest.mark.slow
def test_the_example_of_175_billion_parameters() -> None:
    """By hand, on the first stage of 6 blocks. A block has 12 D^2 parameters (attention 4,
    feed-forward 8) and two norms. Activations: the formulas of docs/guide/memory.md, selective, of
    16 microbatches."""
    example = Path(__file__).parents[3] / "examples" / "175b" / "run.yaml"
    outcome = within("layout", "show", example, "--ranks-per-node", "8", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    assert len(found["ranks"]) == 1024
    dim, tokens, tp, shards = 12_288, 2048, 8, 8
    blocks = 6 * (12 * dim * dim // tp + 2 * dim)
    first = found["ranks"][0]
    assert first["held"]["moments"] == pytest.approx(8 * blocks / shards, rel=0.06)  # the embedding
    inner = 2 * dim + dim // tp + 2 * dim // tp + 2 * 32_768 // tp
    kept = 6 * (2 * (tokens // tp) * dim + 2 * tokens * inner) + 2 * (tokens // tp) * dim
    assert first["activations"]["total"] == pytest.approx(16 * kept, rel=0.01)
    assert max(each["estimate"]["peak"] for each in found["ranks"]) < 80e9


# --- `holdfast layout distance` -------------------------------------------------------------------
def test_the_table_says_at_which_bandwidth_the_distance_is_a_hundredfold() -> None:
    """A node has a lower bandwidth than the one that is named just where a ring is that dear."""
    done = within("layout", "distance", "--ranks", "16", "--json").succeeds()
    rows = [row for row in json.loads(done.out) if row["level"] != "node"]
    for row in rows:
        gbit_s = ASSUMED_LINKS[row["level"]].bandwidth * USUAL_DEVICES * 8 / 1e9
        assert (row["ring_ratio"] >= 100) == (gbit_s <= row["hundredfold_gbit_s"])
    assert {row["ring_ratio"] >= 100 for row in rows} == {True, False}


def test_ratios_are_of_times_of_the_same_size() -> None:
    done = within("layout", "distance", "--size", "1000000", "--json")
    rows = json.loads(done.out)
    near = rows[0]
    assert near["level"] == "node"
    for row in rows:
        assert row["ring_ratio"] == row["ring_s"] / near["ring_s"]
        assert row["message_ratio"] == row["message_s"] / near["message_s"]


def test_a_message_without_bytes_is_refused() -> None:
    done = within("layout", "distance", "--size", "0")
    assert done.code == 2
    assert done.err.count("\n") == 1
