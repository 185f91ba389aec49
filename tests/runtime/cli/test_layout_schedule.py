"""`holdfast layout schedule`: what it draws, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from holdfast.core.schedule.csv import to_csv
from holdfast.core.schedule.table import one_f_one_b
from tests.support.commands import Outcome, within, write_run_file

DRAWN = """\
1f1b: 2 stages on 2 ranks, 2 microbatches, makespan 9, bubble 33.3%
rank 0  F0 F1 ......B0--- ...B1---   bubble 33.3%, in flight 2
rank 1  ...F0 B0--- F1 B1--- ......  bubble 33.3%, in flight 1
F forward, B backward, . idle; a label is kind, microbatch
"""


def numbers(found: Outcome) -> dict[str, object]:
    assert found.code == 0, found.err
    value: dict[str, object] = json.loads(found.out)
    return value


def test_draws_a_pipeline() -> None:
    found = within("layout", "schedule", "--stages", 2, "--microbatches", 2)
    assert (found.code, found.out, found.err) == (0, DRAWN, "")


def test_four_stages_and_eight_microbatches_unless_said_otherwise() -> None:
    found = numbers(within("layout", "schedule", "--json"))
    assert found == {
        "schedule": "1f1b",
        "stages": 4,
        "ranks": 4,
        "rank_of": [0, 1, 2, 3],
        "microbatches": 8,
        "makespan": 33.0,
        "bubble": pytest.approx([3 / 11] * 4),
        "in_flight": [4, 3, 2, 1],
    }


@pytest.mark.parametrize(
    ("options", "makespan", "in_flight"),
    [
        (["--schedule", "gpipe"], 33, [8, 8, 8, 8]),
        (["--schedule", "forward"], 11, [1, 1, 1, 1]),
        (["--forward", "2", "--backward", "2"], 44, [4, 3, 2, 1]),
        (["--stages", "2", "--microbatches", "2", "--send", "0.5"], 10, [2, 1]),
        (["--forward", "1,1,1,2", "--backward", "2,2,2,4"], 57, [4, 3, 2, 1]),
        (["--stages", "4", "--virtual", "2", "--schedule", "gpipe"], 51, [16, 16]),
    ],
)
def test_options(options: list[str], makespan: float, in_flight: list[int]) -> None:
    found = numbers(within("layout", "schedule", *options, "--json"))
    assert found["in_flight"] == in_flight
    assert found["makespan"] == makespan


def test_the_least_and_the_longest_times_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    for times in ("1e-9,1e9,1,0", "1e9", "1e-9", "0"):
        found = within("layout", "schedule", "--forward", times, "--send", "1e9", "--svg", path)
        assert found.code == 0, found.err
        ElementTree.parse(path)


def test_writes_svg_and_csv_and_reads_the_table_back(tmp_path: Path) -> None:
    svg, csv = tmp_path / "a.svg", tmp_path / "a.csv"
    sizes = ("--stages", 2, "--microbatches", 2)
    found = within("layout", "schedule", *sizes, "--svg", svg, "--csv", csv)
    assert (found.out, found.err) == (DRAWN, f"wrote {svg}\nwrote {csv}\n")
    assert csv.read_text() == to_csv(one_f_one_b(2, 2))
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    again = within("layout", "schedule", "--from-csv", csv)
    assert again.out == DRAWN.replace("1f1b:", "a.csv:")


def test_a_table_with_a_split_backward(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    found = numbers(within("layout", "schedule", "--from-csv", table, "--json"))
    assert (found["makespan"], found["in_flight"]) == (7, [2, 2])


def run_file(tmp_path: Path, layout: str) -> Path:
    """8 blocks, 16 microbatches."""
    path = write_run_file(tmp_path)
    text = (
        path.read_text()
        .replace("layers: 1", "layers: 8")
        .replace("batch_size: 4", "batch_size: 16")
    )
    assert "batch_size: 16" in text
    path.write_text(text.replace("layout: {workers: 2}", f"layout: {layout}"))
    return path


def test_a_run_file_gives_stages_microbatches_and_times(tmp_path: Path) -> None:
    """2 replicas of 2 stages share 16 microbatches; times are those of the blocks, mean 1."""
    path = run_file(tmp_path, "{workers: 4, pp: 2, stages: [2, 6]}")
    vocabulary = "model.vocab_size=0"
    found = numbers(within("layout", "schedule", path, vocabulary, "--json"))
    assert (found["schedule"], found["ranks"], found["microbatches"]) == ("1f1b", 2, 8)
    assert found["makespan"] == pytest.approx(0.5 + 8 * 1.5 * 3 + 0.5 * 2, rel=0.01)
    assert found["bubble"] == pytest.approx([1 - 12 / 37.5, 1 - 36 / 37.5], abs=0.01)


@pytest.mark.parametrize(
    ("layout", "ranks", "stages"),
    [
        ("{workers: 2, pp: 2, schedule: interleaved, virtual_stages: 4}", 2, 8),
        ("{workers: 2, pp: 2, schedule: interleaved}", 2, 4),
        ("{workers: 2, pp: 2, schedule: zbv}", 2, 4),
        ("{workers: 2, schedule: zbv}", 1, 1),
    ],
)
def test_a_run_file_says_how_many_stages_a_rank_has(
    layout: str, ranks: int, stages: int, tmp_path: Path
) -> None:
    found = numbers(within("layout", "schedule", run_file(tmp_path, layout), "--json"))
    assert (found["ranks"], found["stages"]) == (ranks, stages)


def test_the_head_counts_as_what_it_costs(tmp_path: Path) -> None:
    path = run_file(tmp_path, "{workers: 2, pp: 2, stages: [4, 4]}")
    plain = numbers(within("layout", "schedule", path, "--json"))
    heavy = numbers(within("layout", "schedule", path, "model.vocab_size=9999", "--json"))
    assert plain["bubble"][0] == pytest.approx(plain["bubble"][1], abs=0.01)  # type: ignore[index]
    assert heavy["bubble"][0] > heavy["bubble"][1] + 0.1  # type: ignore[index]


def test_options_beside_a_run_file(tmp_path: Path) -> None:
    path = run_file(tmp_path, "{workers: 2, pp: 2}")
    options = ("--schedule", "gpipe", "--microbatches", 3, "--forward", 1, "--json")
    found = numbers(within("layout", "schedule", path, *options))
    assert (found["schedule"], found["microbatches"], found["makespan"]) == ("gpipe", 3, 12)


def test_unlike_replicas_are_drawn_one_at_a_time(tmp_path: Path) -> None:
    path = run_file(tmp_path, "{workers: 5, replicas: [{pp: 3}, {pp: 2}]}")
    ranks = [
        numbers(within("layout", "schedule", path, "--replica", which, "--json"))["ranks"]
        for which in (0, 1)
    ]
    assert ranks == [3, 2]
    within("layout", "schedule", path, "--replica", 2).refuses(
        "--replica: there is no replica 2; use 0 to 1"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--stages", "4", "--microbatches", "3"],
            [
                "the schedule 1f1b over 4 ranks needs at least 4 microbatches, there are 3",
                "use 4 or more microbatches a replica, fewer stages, or the schedule gpipe",
            ],
        ),
        (["--schedule", "1f1p"], ["there is no schedule '1f1p'", "use 1f1b"]),
        (["--stages", "0"], ["--stages", "greater than or equal to 1"]),
        (["--stages", "5", "--virtual", "2", "--schedule", "gpipe"], ["use --stages 6"]),
        (["--virtual", "2"], ["1f1b has one stage a rank, not 2"]),
        (["--schedule", "zbv", "--virtual", "1"], ["has 2 stages", "use --virtual 2"]),
        (["--schedule", "zbv", "--stages", "5"], ["--stages: 5 stages", "use --stages 6"]),
        (["--forward", "soon"], ["--forward: 'soon' is not a time"]),
        (["--backward", "1,2"], ["--backward: there are 2 times for 4 stages; give one, or 4"]),
        (["--send", "-1"], ["--send: -1.0 is no time"]),
        (["--stages", "1000", "--microbatches", "60000"], ["too many to draw", "use 200 or fewer"]),
        (["--replica", "1"], ["--replica has no effect with options without a run file"]),
        (["--from-csv", "none.csv"], ["none.csv: the table cannot be read (No such file"]),
        (
            ["--from-csv", "none.csv", "--stages", "2"],
            ["--stages has no effect with --from-csv; leave one of the two out"],
        ),
        (
            ["--forward", "1e307"],
            ["--forward: 1e+307 is no time that can be drawn; use 0, or 1e-09 to 1e+09"],
        ),
        (["--send", "1e-320"], ["--send: ", "is no time that can be drawn"]),
        (["none.yaml"], ["none.yaml: there is no such run file"]),
        (["none.yaml", "--stages", "2"], ["--stages has no effect with a run file"]),
        (["--svg", "no/folder/a.svg"], ["no/folder/a.svg: it cannot be written (No such file"]),
    ],
)
def test_bad_input_is_one_sentence(
    options: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    within("layout", "schedule", *options).refuses(*words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (b"0F0,0B0\n1B0,1F0\n", "schedule t.csv: rank 1 runs 1B0 before 1F0, which it needs"),
        (
            b"0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            "deadlock: rank 0 at 0B0 waits for 1B0 of rank 1, rank 1 at 1F1 waits for 0F1 of "
            "rank 0",
        ),
        (b"0F0,0B0\n1F0\n", "stage 1 needs B, or I and W, of microbatch 0, and has none of them"),
        (b"0F0,zero\n", "t.csv, row 1, column 2: 'zero' is no action; write stage, one of F, B"),
        (b"", "t.csv: the table has no action"),
        (b"\xff\xfe", "t.csv: the table cannot be read (it is not UTF-8 text)"),
        (b"0F0,0B" + b"9" * 5000, "is no action"),
        (b'0F0,"' + b"0" * 200000, "t.csv: this is no CSV (field larger than field limit"),
    ],
)
def test_bad_tables_are_one_sentence(table: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(table)
    within("layout", "schedule", "--from-csv", file).refuses(words)
