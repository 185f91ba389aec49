"""The small server: its replies, the canary's share and end, ratings, and drift."""

from __future__ import annotations

import json
import random
import re
import signal
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast_lab.chaos.sample_run import WORDS
from holdfast_platform.serve.arms import Arms, Drift
from holdfast_platform.serve.server import REQUEST
from tests.support.borders import unknown_entries
from tests.support.commands import here, start, within, write_run_file
from tests.support.ranks import wait_until


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5])
def test_the_second_model_gets_its_share_and_is_not_foreseen(share: float) -> None:
    dealt = []
    for seed in (1, 2):
        arms = Arms("a", "b", share, stops=True, seed=seed)
        dealt.append([arms.deal().name for _ in range(2000)])
        for end in range(100, 2001, 100):
            assert abs(dealt[-1][:end].count("b") - share * end) <= 1
    assert dealt[0] != dealt[1]


@pytest.mark.parametrize("by", ["errors", "ratings"])
def test_a_worse_canary_stops_and_an_equal_one_does_not(by: str) -> None:
    def serve(seed: int, bad: float, worse: float) -> tuple[Arms, int]:
        """Bad replies of the first and the second model -> the arms, and requests until the end."""
        arms, draw = Arms("a", "b", 0.05, stops=True, seed=seed), random.Random(seed)
        for number in range(4000):
            arm = arms.deal()
            is_bad = draw.random() < (worse if arm is arms.second else bad)
            if by == "errors":
                arms.failed(arm, is_bad)
            else:
                arms.rate(arm, 0.0 if is_bad else 1.0)
            if arms.stopped:
                assert {arms.deal().name for _ in range(100)} == {"a"}
                return arms, number
        return arms, 4000

    ends = [serve(seed, 0.02, 0.7)[1] for seed in range(20)]
    assert max(ends) < 1500, ends
    assert not any(serve(seed, 0.3, 0.3)[0].stopped for seed in range(40))
    assert not any(serve(seed, 0.3, 0.1)[0].stopped for seed in range(10))


def test_drift_is_told_and_sameness_is_not() -> None:
    draw = random.Random(2)
    baseline = [draw.gauss(4, 1) for _ in range(300)]
    for mean, told in ((4.0, False), (6.0, True), (2.5, True)):
        drift = Drift(baseline)
        found = [drift.add(draw.gauss(mean, 1)) for _ in range(400)]
        assert any(found) is told, mean


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "t"
    words = ("layout.workers=1", "train.steps=60", "train.optimizer.learning_rate=0.01")
    within("train", write_run_file(folder), *words).succeeds()
    return folder


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[tuple[str, Path]]:
    """The address, and the file that drift is written to."""
    draw, rows, finding = random.Random(1), root / "rows.jsonl", root / "drifted.json"
    texts = [" ".join(draw.choices(WORDS, k=12)) for _ in range(150)]
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    within("export", root / "run", "--to", root / "model").succeeds()
    words = ("--canary", root / "model", "--port", "0", "--drift", rows, "--finding", finding)
    command = f"echo $HOLDFAST_DRIFT > {root}/ran"
    process = start("serve", root / "run", *words, "--on-drift", command)
    assert process.stderr is not None
    found, said = None, []
    while found is None:
        line = process.stderr.readline()
        said.append(line)
        assert line, said
        found = re.search(r"http://\S+/v1", line)
    yield found[0], finding
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def call(url: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
def test_replies_are_those_of_generate(
    served: tuple[str, Path], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = served
    assert [m["id"] for m in call(f"{url}/models")[1]["data"]] == ["run", "model"]
    ask = {"prompt": "the quick", "max_tokens": 9, "temperature": 0}
    said = call(f"{url}/completions", ask)[1]["choices"][0]["text"]
    words = ("--tokens", "9", "--temperature", "0")
    assert here(capsys, "generate", root / "run", "the quick", *words).out == f"the quick{said}\n"
    drawn = {"prompt": "the quick", "max_tokens": 9, "seed": 5}
    texts = [call(f"{url}/completions", drawn)[1]["choices"][0]["text"] for _ in range(3)]
    assert len(set(texts)) == 1
    stopped = call(f"{url}/completions", ask | {"stop": said[2:4]})[1]["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (said[: said.index(said[2:4])], "stop")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("completions", {"prompt": "a", "stream": True}, 400, "stream"),
        ("completions", {"prompt": "a", "n": 2}, 400, "n 2"),
        ("completions", {"prompt": "a", "model": "gpt"}, 400, "use run"),
        ("completions", {"prompt": "a", "tempature": 1}, 400, "did you mean temperature"),
        ("completions", {"prompt": "a", "max_tokens": 99999}, 400, "99999"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 400, "chat data"),
        ("ratings", {"id": "cmpl-0", "rating": 2}, 400, "rat"),
        ("other", {}, 404, "/v1/other"),
    ],
)
def test_what_the_server_does_not_do_is_named(
    served: tuple[str, Path], path: str, body: dict[str, Any], status: int, said: str
) -> None:
    code, answer = call(f"{served[0]}/{path}", body)
    assert code == status, answer
    assert said in answer["error"]["message"]


def test_other_machines_need_a_key(tmp_path: Path) -> None:
    found = within("serve", tmp_path, "--host", "0.0.0.0")
    assert found.code == 2
    assert "--key-variable" in found.err


@pytest.mark.slow
def test_fields_that_no_list_has_are_refused(served: tuple[str, Path]) -> None:
    for name, value in unknown_entries(REQUEST).items():
        code, answer = call(f"{served[0]}/completions", {"prompt": "a", name: value})
        assert code == 400
        assert name in answer["error"]["message"]


@pytest.mark.slow
def test_a_canary_that_is_rated_lower_stops_by_itself_and_drift_is_written(
    served: tuple[str, Path], root: Path
) -> None:
    url, finding = served
    counts: Counter[str] = Counter()
    for _ in range(400):
        said = call(f"{url}/completions", {"prompt": "zzzz qqqq", "max_tokens": 1})[1]
        counts[said["model"]] += 1
        call(f"{url}/ratings", {"id": said["id"], "rating": float(said["model"] == "run")})
        if call(f"{url}/arms")[1]["stopped"]:
            break
    assert 0.03 < counts["model"] / counts.total() < 0.07
    assert "rating is below" in call(f"{url}/arms")[1]["stopped"]
    after = {
        call(f"{url}/completions", {"prompt": "a b", "max_tokens": 1})[1]["model"]
        for _ in range(50)
    }
    assert after == {"run"}
    pinned = call(f"{url}/completions", {"prompt": "a b", "model": "model"})
    assert pinned[0] == 400
    wait_until(lambda: (root / "ran").exists() and (root / "ran").read_text(), seconds=60)
    found = json.loads(finding.read_text())
    assert found["prompts"] < 400
    assert found["bounds"][0] > 0.5 + found["baseline_error"]
    assert (root / "ran").read_text().strip() == str(finding)
