"""Completions by a server that speaks the OpenAI protocol, such as vLLM.

A completion is asked for by token ids, with a seed and the log-probability of each token. A server
promises no bits: the same request may get another completion. A request that failed is sent again,
because nothing is lost with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from holdfast.errors import UserError, nearest_of
from holdfast.rollout.decode.server_link import (
    KEY,
    BadAnswerError,
    ServerAddress,
    ServerLink,
    ServerUnavailableError,
    json_object,
)
from holdfast.rollout.decode.source import CompletionSource
from holdfast.rollout.messages import Completion, CompletionKey, CompletionRequest, Finish, Sampling

NOT_PROMISED = (
    "completions come from a server: the same run may get other ones, so its bits are not promised"
)
_MOMENT_S = 0.2  # that `step` waits
_TOKEN = "token_id:"  # how vLLM writes a token as text


class ServerDecoder(CompletionSource):
    """Asks a server for completions."""

    def __init__(self, address: ServerAddress, slots: int):
        self._address, self._model, self._slots = address, address.model, slots
        self._link = ServerLink(address)
        self._pool = ThreadPoolExecutor(slots, thread_name_prefix="completion")
        self._running: dict[Future[Completion], tuple[CompletionRequest, int]] = {}
        self.problem = ""  # why the server gave no answer, after all tries of a request

    @property
    def slots(self) -> int:
        """Completions that are asked for at a time."""
        return self._slots

    @property
    def free(self) -> int:
        """Requests that can be sent now."""
        return self._slots - len(self._running)

    def start(self, request: CompletionRequest, run_seed: int) -> Completion | None:
        """Send a request. Its completion comes from `step`."""
        assert self.free, "no slot is free"
        self._running[self._pool.submit(self._ask, request, run_seed)] = request, run_seed
        return None

    def step(self) -> list[Completion]:
        """Wait a moment for completions that ended. Raises UserError for an answer that no other
        try changes. While the server gives no answer, requests are sent again for ever."""
        done, _ = wait(self._running, timeout=_MOMENT_S, return_when=FIRST_COMPLETED)
        ended = []
        for future in done:
            request, run_seed = self._running.pop(future)
            try:
                ended.append(future.result())
            except ServerUnavailableError as error:
                self.problem = str(error)
                self.start(request, run_seed)
        return ended

    def use_adapter(self, name: str, folder: str) -> None:
        """Have the server load a PEFT folder as `name`, and ask this model from now on. It reads
        the folder itself. vLLM does so with VLLM_ALLOW_RUNTIME_LORA_UPDATING=true and
        --enable-lora. Raises UserError if the server refuses, ServerUnavailableError."""
        assert self.free == self._slots, "completions of the older adapter are under way"
        if name not in self._models():
            body = {"lora_name": name, "lora_path": folder}
            try:
                self._link.ask("POST", "/load_lora_adapter", body, lambda _: None)
            except UserError:
                if name not in self._models():  # another actor was faster
                    raise
        self._model = name

    def _models(self) -> list[str]:
        return self._link.ask("GET", "/models", None, _read_models)

    def cancel(self) -> None:
        """Drop the requests that are under way, and end their connections."""
        if self._running:
            self._link.interrupt()
            wait(self._running)
            self._running.clear()
            self._link = ServerLink(self._address)

    def close(self) -> None:
        """End all threads."""
        self.cancel()
        self._pool.shutdown()

    def _ask(self, request: CompletionRequest, run_seed: int) -> Completion:
        body = request_body(self._model, request, run_seed)
        return self._link.ask("POST", "/completions", body, partial(read_completion, request))


def check_server(address: ServerAddress, sampling: Sampling, vocabulary: int) -> None:
    """Raises UserError if the server is not there, does not have the model, or does not give what a
    run needs. vocabulary: tokens of the run's model."""
    if sampling.top_p < 1:
        raise UserError(
            f"top_p {sampling.top_p:g} cannot be used with a server, whose log-probabilities may "
            "or may not follow it",
            where=KEY,
            remedy="use rollout.top_p 1",
        )
    link = ServerLink(address, tries=2)
    try:
        models = link.ask("GET", "/models", None, _read_models)
        if address.model not in models:
            near = nearest_of(address.model, models, cutoff=0.0)
            raise UserError(
                f"the server has no model {address.model!r}",
                where=KEY,
                remedy=f"use {near!r}" if near else "name a model that it serves",
            )
        first = _probe(link, address, 1.0, vocabulary)
        if sampling.temperature in (0.0, 1.0):
            return
        other = _probe(link, address, sampling.temperature, vocabulary)
    except ServerUnavailableError as error:
        raise UserError(
            str(error), where=KEY, remedy=f"start it, or correct its address {address.url}"
        ) from None
    if math.isclose(first, other, abs_tol=1e-2) and first < -0.1:
        raise UserError(
            f"the server's log-probabilities do not follow temperature {sampling.temperature:g}",
            where=KEY,
            remedy="start vLLM with --logprobs-mode processed_logprobs, or use temperature 1",
        )


def request_body(model: str, request: CompletionRequest, run_seed: int) -> dict[str, Any]:
    """The JSON of one request. What a server's own defaults could change is named."""
    how = request.sampling
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": how.max_tokens,
        "temperature": how.temperature,
        "top_p": how.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": request.key.seed(run_seed, 0),
        "stop_token_ids": list(how.stop),
        "ignore_eos": True,  # `stop` has all end tokens
        "skip_special_tokens": False,
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def read_completion(request: CompletionRequest, data: bytes) -> Completion:
    """Read an answer. Raises UserError for one that no run can use, BadAnswerError for one that is
    damaged."""
    try:
        choice = json_object(data)["choices"][0]
        ended = choice["finish_reason"]
    except (KeyError, IndexError, TypeError):
        raise BadAnswerError("the answer has no choice with a finish_reason") from None
    read = choice.get("prompt_token_ids")
    if read is not None and read != list(request.prompt):
        raise UserError(
            "the server read another prompt than it was given",
            where=KEY,
            remedy="serve the model without a change of prompts (such as a token at their start)",
        )
    tokens, logps = _tokens_and_logps(choice)
    how = request.sampling
    if ended not in ("stop", "length"):
        raise BadAnswerError(f"a completion ended by {ended!r}")
    if not tokens or len(tokens) > how.max_tokens:
        raise BadAnswerError(f"{len(tokens)} tokens, and 1 to {how.max_tokens} were asked for")
    is_end = tokens[-1] in how.stop
    if ended == "stop" and not is_end:
        raise UserError(
            f"the server ended a completion at token {tokens[-1]}, which is no end token of the "
            "run, or left the end token out",
            where=KEY,
            remedy="serve the model with --generation-config vllm",
        )
    finish: Finish = "stop" if is_end else "length"
    if finish == "length" and len(tokens) < how.max_tokens:
        raise BadAnswerError(f"{len(tokens)} of {how.max_tokens} tokens and no end token")
    return Completion(request.key, tuple(tokens), tuple(logps), finish)


def _tokens_and_logps(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Raises UserError if the server gives no token ids or log-probabilities."""
    said = choice.get("logprobs") or {}
    tokens: Any = choice.get("token_ids")
    logps: Any = said.get("token_logprobs")
    texts = said.get("tokens") or [None]
    if tokens is None and all(str(text).startswith(_TOKEN) for text in texts):
        tokens = [int(text.removeprefix(_TOKEN)) for text in texts]
    for what, values in (("token ids", tokens), ("log-probabilities", logps)):
        if values is None:
            raise UserError(
                f"the server gives no {what}",
                where=KEY,
                remedy="use a server that does, such as vLLM 0.10.2 or newer",
            )
    if not all(isinstance(token, int) for token in tokens) or len(tokens) != len(logps):
        raise BadAnswerError(f"{len(tokens)} tokens with {len(logps)} log-probabilities")
    if not all(isinstance(logp, int | float) and math.isfinite(logp) for logp in logps):
        raise BadAnswerError("a log-probability that is no number")
    return tokens, [float(logp) for logp in logps]


def _read_models(data: bytes) -> list[str]:
    rows = json_object(data).get("data")
    rows = rows if isinstance(rows, list) else []
    return [row["id"] for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]


def _probe(link: ServerLink, address: ServerAddress, temperature: float, vocabulary: int) -> float:
    """Ask for one token. Return the log-probability of the likeliest one."""
    request = CompletionRequest(CompletionKey(0, 0, 0, 0), (0,), Sampling(1, temperature))

    def read(data: bytes) -> float:
        made = read_completion(request, data)
        if made.tokens[0] >= vocabulary:
            raise UserError(
                f"the server's model gave token {made.tokens[0]}, and the run's has {vocabulary}",
                where=KEY,
                remedy="serve the model that the run trains",
            )
        said = json_object(data)["choices"][0]["logprobs"]
        best = (said.get("top_logprobs") or [{}])[0] or {}
        return float(max([*best.values(), made.logps[0]]))

    return link.ask("POST", "/completions", request_body(address.model, request, 0), read)
