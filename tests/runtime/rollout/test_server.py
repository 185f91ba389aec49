"""Completions by a real server of the OpenAI protocol that misbehaves."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.model import ModelConfig
from holdfast.errors import UserError
from holdfast.rollout.decode.server import ServerDecoder, check_server
from holdfast.rollout.decode.server_link import ServerAddress, ServerLink, ServerUnavailableError
from holdfast.rollout.messages import Completion, CompletionKey, CompletionRequest, Sampling
from tests.support.adapters import write_base
from tests.support.completion_server import (
    END,
    MODEL,
    VOCABULARY,
    CompletionServer,
    completion_server,
)
from tests.support.rollout_run import RolloutRun, write_run_file

HOW = Sampling(12, stop=(END,))
REQUESTS = [
    CompletionRequest(CompletionKey(1, 0, prompt, sample), (prompt, 7), HOW)
    for prompt in range(6)
    for sample in range(3)
]


@pytest.fixture
def server() -> Iterator[CompletionServer]:
    with completion_server() as made:
        yield made


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.rollout.decode.server_link._MAX_PAUSE_S", 0.01)


def address(server: CompletionServer, **how: Any) -> ServerAddress:
    return ServerAddress(server.url, MODEL, **{"timeout_s": 60.0, **how})


def all_of(where: ServerAddress, slots: int) -> list[Completion]:
    decoder = ServerDecoder(where, slots)
    try:
        made = list(decoder.generate(iter(REQUESTS), run_seed=4))
    finally:
        decoder.close()
    return sorted(made, key=lambda each: each.key)


def test_each_request_gets_its_completion_whatever_goes_wrong(server: CompletionServer) -> None:
    wanted = all_of(address(server), 1)
    assert [each.key for each in wanted] == [each.key for each in REQUESTS]
    assert {each.finish for each in wanted} == {"stop", "length"}
    assert all((each.tokens[-1] == END) == (each.finish == "stop") for each in wanted)
    assert {each["seed"] for each in server.asked} == {r.key.seed(4, 0) for r in REQUESTS}
    server.habits.extend(["error", "cut", "reset", "busy", "html", "error"] * 3)
    assert all_of(address(server), 4) == wanted
    assert not server.habits
    server.changes = {"token_ids": None}  # the tokens' names are left
    assert all_of(address(server), 4) == wanted


def test_a_slow_answer_is_given_up_and_a_server_that_is_down_is_asked_again(
    server: CompletionServer,
) -> None:
    server.habits.extend(["drip", "drip"])
    assert len(all_of(address(server, timeout_s=0.5), 2)) == len(REQUESTS)
    decoder = ServerDecoder(address(server, tries=2), 1)
    server.habits.extend(["error"] * 4)
    (made,) = decoder.generate([REQUESTS[0]], 4)
    assert made == all_of(address(server), 1)[0]
    assert decoder.problem.endswith("to /completions: it answers 500 (CUDA out of memory)")
    decoder.close()


def test_cancelled_requests_end_at_once(server: CompletionServer) -> None:
    server.habits.extend(["drip"] * 3)
    decoder = ServerDecoder(address(server, timeout_s=600.0), 3)
    for request in REQUESTS[:3]:
        decoder.start(request, 4)
    while server.habits:
        assert decoder.step() == []
    decoder.cancel()
    assert decoder.free == 3
    assert len(list(decoder.generate(REQUESTS[:2], 4))) == 2
    decoder.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("completion")]


def test_an_adapter_is_a_model_of_its_own(server: CompletionServer) -> None:
    decoder = ServerDecoder(address(server), 2)
    (base,) = decoder.generate(REQUESTS[:1], 4)
    for _ in range(2):  # the second time it is there
        decoder.use_adapter("policy-7", "/runs/adapter")
    (made,) = decoder.generate(REQUESTS[:1], 4)
    assert (made.key, server.asked[-1]["model"]) == (base.key, "policy-7")
    assert server.models == [MODEL, "policy-7"]
    decoder.close()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"logprobs": None, "token_ids": [1]}, "gives no log-probabilities"),
        ({"logprobs": {"token_logprobs": [-1.0]}, "token_ids": None}, "gives no token ids"),
        ({"token_ids": [VOCABULARY]}, f"the server's model gave token {VOCABULARY}"),
        ({"finish_reason": "stop", "token_ids": [9]}, "no end token of the run"),
        ({"prompt_token_ids": [1, 0]}, "read another prompt"),
        ({"finish_reason": "abort"}, "ended by 'abort'"),
        ({"token_ids": [1, 2]}, "2 tokens with 1 log-probabilities"),
    ],
)
def test_answers_that_no_run_can_use_are_refused_before_the_start(
    server: CompletionServer, changes: dict[str, Any], problem: str
) -> None:
    check_server(address(server), HOW, VOCABULARY)
    server.changes = changes
    with pytest.raises(UserError, match=problem):
        check_server(address(server), HOW, VOCABULARY)


def test_what_cannot_work_is_refused_before_the_start(
    server: CompletionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(problem: str, how: Sampling = HOW, **changes: Any) -> None:
        with pytest.raises(UserError, match=problem) as caught:
            check_server(replace(address(server, tries=1), **changes), how, VOCABULARY)
        assert "s3cret" not in str(caught.value)

    refuses("no model 'police'; use 'policy'", model="police")
    refuses("cannot be used with a server", how=replace(HOW, top_p=0.9))
    for url in ("127.0.0.1:80/v1", "http://s3cret@host/v1", "http://host:port/v1", ""):
        refuses("address is not http", url=url)
    refuses("cannot be reached|refused", url="http://127.0.0.1:9/v1")
    refuses("refuses a request with 404", url=server.url.removesuffix("v1") + "nothing")
    refuses("POLICY_KEY has no key", key_variable="POLICY_KEY")
    server.key = "s3cret"
    refuses("refuses the key")
    monkeypatch.setenv("POLICY_KEY", "s3cret-of-another")
    refuses(r"Bearer \*\*\* is not allowed.*POLICY_KEY", key_variable="POLICY_KEY")
    monkeypatch.setenv("POLICY_KEY", "s3cret")
    check_server(address(server, key_variable="POLICY_KEY"), HOW, VOCABULARY)
    server.is_raw, server.key = True, ""
    check_server(address(server), HOW, VOCABULARY)
    refuses("do not follow temperature 0.7", how=replace(HOW, temperature=0.7))
    server.is_raw = False
    check_server(address(server), replace(HOW, temperature=0.7), VOCABULARY)


def test_a_link_that_was_interrupted_sends_nothing(server: CompletionServer) -> None:
    link = ServerLink(address(server))
    link.interrupt()
    with pytest.raises(ServerUnavailableError, match="interrupted"):
        link.ask("GET", "/models", None, json.loads)


def test_a_run_of_adapters_generates_on_a_server(tmp_path: Path) -> None:
    """The server loads the adapters of each policy, and generates with those of the last."""
    run_file = write_run_file(tmp_path)
    text = re.sub("model: .*", "model: {from: base}\nlora: {rank: 4}", run_file.read_text())
    run_file.write_text(text)
    sizes = {"layers": 2, "dim": 32, "heads": 2, "kv_heads": 2, "ffn_dim": 64, "max_position": 64}
    write_base(tmp_path / "base", ModelConfig(vocab_size=257, **sizes))
    shutil.copy(tmp_path / "tokenizer.json", tmp_path / "base")
    with completion_server() as server:
        named = (f"rollout.server.url={server.url}", f"rollout.server.model={MODEL}")
        run = RolloutRun(run_file, tmp_path / "run", ("train.steps=2", "rollout.slots=4", *named))
        run.finish()
        policies = [name.split("-")[1] for name in server.models[1:]]
        assert policies == ["0", "1"], "of step 1 and 2"
        assert Counter(asked["model"] for asked in server.asked[1:]) == dict.fromkeys(
            server.models[1:], 16
        )
    assert "its bits are not promised" in run.said
