"""A small server of the OpenAI protocol, for tests and demonstrations."""

from __future__ import annotations

import asyncio
import hmac
import json
import queue
import random
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from ssl import SSLContext
from typing import Any

from holdfast.borders import Border
from holdfast.core.json_parsing import parse_json
from holdfast.errors import ConfigError, HoldfastError, UserError
from holdfast.evaluation.model import EvaluatedModel
from holdfast.rollout.messages import Completion, CompletionKey, CompletionRequest, Sampling
from holdfast.wire.http.connection import BodyHandler, HttpResponse, RequestHead
from holdfast.wire.http.connection_limits import ConnectionLimiter
from holdfast.wire.http.refusals import HEALTH
from holdfast.wire.http.server import MAX_BODY_BYTES, BodyClaim
from holdfast_platform.serve.arms import Arm, Arms

MAX_LENGTH = 4096  # tokens of a prompt and its reply at most
DEFAULT_TOKENS = 128
MAX_KNOWN_REPLIES = 10_000  # whose ratings are still taken

REQUEST = Border(
    "a request of the OpenAI protocol",
    frozenset(
        (
            *("model", "prompt", "messages", "max_tokens", "max_completion_tokens"),
            *("temperature", "top_p", "seed", "stop"),
        )
    ),
    frozenset(("user", "metadata", "store", "service_tier", "safety_identifier")),
    {
        **dict.fromkeys(("n", "best_of", "repetition_penalty"), (1,)),
        **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "logprobs"), (0,)),
        "top_k": (-1,),
        "response_format": ({"type": "text"},),
    },
    entry="field",
)


@dataclass(frozen=True, order=True)
class _Key(CompletionKey):
    """The number is no part of the seed: equal requests with equal seeds get equal replies."""

    number: int = 0


class ServedModel:
    """A model with a thread that generates for all its requests."""

    def __init__(self, name: str, model: EvaluatedModel, slots: int):
        self.name, self.model, self.limit = name, model, min(model.limit, MAX_LENGTH)
        decoder = model.decoder(slots, self.limit)
        if decoder is None:
            raise ConfigError(
                "only models of the built-in decoder are served",
                where=name,
                remedy="export the run, and serve the folder with vLLM",
            )
        self._decoder = decoder
        self._queue: queue.SimpleQueue[tuple[CompletionRequest, int, Future[Completion]]]
        self._queue = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"serve {name}", daemon=True).start()

    def generate(self, request: CompletionRequest, seed: int) -> Future[Completion]:
        future: Future[Completion] = Future()
        self._queue.put((request, seed, future))
        return future

    def _work(self) -> None:
        running: dict[CompletionKey, Future[Completion]] = {}
        while True:
            while self._decoder.free and (not running or not self._queue.empty()):
                request, seed, future = self._queue.get()
                running[request.key] = future
                try:
                    ended = self._decoder.start(request, seed)
                except Exception as error:
                    running.pop(request.key).set_exception(error)
                    continue
                if ended is not None:
                    running.pop(ended.key).set_result(ended)
            try:
                for ended in self._decoder.step():
                    running.pop(ended.key).set_result(ended)
            except Exception as error:  # logits that are not finite
                self._decoder.cancel()
                for future in running.values():
                    future.set_exception(error)
                running.clear()


class CompletionApplication:
    """Answers /v1/models, /v1/completions, /v1/chat/completions, /v1/ratings and /v1/arms.

    Args:
        models: by name; those of `arms` are there.
        key: that a request must name; "" for none.
        on_prompt: is given the tokens of each prompt.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        arms: Arms,
        say: Callable[[str], None],
        key: str = "",
        on_prompt: Callable[[list[int]], None] = lambda ids: None,
    ):
        self.limiter = ConnectionLimiter(HEALTH)
        self.tls: SSLContext | None = None
        self._models, self.arms, self._say, self._key = models, arms, say, key
        self._on_prompt, self._numbers = on_prompt, count()
        self._replies: OrderedDict[str, Arm] = OrderedDict()  # by id
        self._posts: dict[bytes, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            b"/v1/completions": partial(self._complete, False),
            b"/v1/chat/completions": partial(self._complete, True),
            b"/v1/ratings": self._rate,
        }

    def admit(self, head: RequestHead) -> HttpResponse | BodyHandler:
        given = head.headers.get("authorization", "").encode()
        if self._key and not hmac.compare_digest(given, f"Bearer {self._key}".encode()):
            return _error(401, "the key is missing or wrong")
        path = head.target.partition(b"?")[0]
        if head.method == b"GET" and path == b"/v1/models":
            names = [
                {"id": name, "object": "model", "owned_by": "holdfast"} for name in self._models
            ]
            return _json({"object": "list", "data": names})
        if head.method == b"GET" and path == b"/v1/arms":
            return _json(self.arms.to_json())
        handler = self._posts.get(path)
        if handler is None or head.method != b"POST":
            return _error(
                404, f"there is no {head.method.decode()} {path.decode(errors='replace')}"
            )
        try:
            if BodyClaim.of(head).length > MAX_BODY_BYTES:
                return _error(413, f"a body may have {MAX_BODY_BYTES} bytes")
        except ValueError as error:
            return _error(411, str(error))

        async def read(body: bytes) -> HttpResponse:
            try:
                value = parse_json(body)
                if not isinstance(value, dict):
                    raise ValueError("the body is no JSON object")
                return _json(await handler(value))
            except (UserError, ValueError, KeyError, TypeError) as error:
                return _error(400, str(error))
            except Exception as error:
                return _error(500, f"{type(error).__name__}: {error}")

        return read

    async def _complete(self, is_chat: bool, asked: dict[str, Any]) -> dict[str, Any]:
        REQUEST.check(asked, "request", UserError, "leave it out, or serve with vLLM")
        arm = self._arm(asked.get("model"))
        served, number = self._models[arm.name], next(self._numbers)
        texts, stops = served.model.texts, asked.get("stop") or []
        prompt = asked["messages"] if is_chat else asked["prompt"]
        if is_chat:
            ids = texts.chat_ids(prompt)
        else:
            ids = (
                texts.text_ids(prompt) if isinstance(prompt, str) else [int(id_) for id_ in prompt]
            )
        self._on_prompt(ids)
        room = asked.get("max_completion_tokens") or asked.get("max_tokens")
        how = Sampling(
            int(room or max(1, min(DEFAULT_TOKENS, served.limit - len(ids)))),
            float(1.0 if asked.get("temperature") is None else asked["temperature"]),
            float(1.0 if asked.get("top_p") is None else asked["top_p"]),
            tuple(sorted(texts.stop)),
        )
        seed = asked.get("seed")
        request = CompletionRequest(_Key(0, 0, 0, 0, number), tuple(ids), how)
        future = served.generate(request, random.getrandbits(62) if seed is None else int(seed))
        try:
            done = await asyncio.wrap_future(future)
        except UserError as error:
            if "not finite" not in str(error):
                raise
            self._end(arm, is_error=True)
            raise HoldfastError(str(error)) from None
        except Exception:
            self._end(arm, is_error=True)
            raise
        self._end(arm, is_error=False)
        text = served.model.text_of([token for token in done.tokens if token not in texts.stop])
        finish = done.finish
        for stop in [stops] if isinstance(stops, str) else stops:
            head, found, _ = text.partition(stop)
            text, finish = head, "stop" if found else finish
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{number}"
        self._replies[name] = arm
        if len(self._replies) > MAX_KNOWN_REPLIES:
            self._replies.popitem(last=False)
        said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(done.tokens)}
        return {
            "id": name,
            "object": "chat.completion" if is_chat else "text_completion",
            "model": arm.name,
            "choices": [{"index": 0, **said, "finish_reason": finish}],
            "usage": usage | {"total_tokens": sum(usage.values())},
        }

    def _arm(self, named: str | None) -> Arm:
        """Return the model that answers. Raises UserError for a name that none has."""
        first, second = self.arms.first, self.arms.second
        if named is None or named == first.name:
            return self.arms.deal()
        if second is None or named != second.name or self.arms.stopped:
            why = self.arms.stopped and f": {self.arms.stopped}"
            remedy = f"use {first.name}{why}"
            raise UserError(f"no model {named!r} is served", where="model", remedy=remedy)
        return second

    async def _rate(self, value: dict[str, Any]) -> dict[str, Any]:
        name, rating = str(value.get("id")), value.get("rating")
        if name not in self._replies:
            raise ValueError(f"there is no reply {name!r} that is not rated")
        if isinstance(rating, bool) or not isinstance(rating, int | float) or not 0 <= rating <= 1:
            raise ValueError("the rating is no number from 0 to 1")
        was = self.arms.stopped
        self.arms.rate(self._replies.pop(name), float(rating))
        self._say_stop(was)
        return {"id": name}

    def _end(self, arm: Arm, is_error: bool) -> None:
        was = self.arms.stopped
        self.arms.failed(arm, is_error)
        self._say_stop(was)

    def _say_stop(self, was: str) -> None:
        if self.arms.stopped and not was and self.arms.second is not None:
            self._say(f"{self.arms.second.name} gets no more requests: {self.arms.stopped}")


def _json(value: Mapping[str, Any], status: int = 200) -> HttpResponse:
    content = json.dumps(value, separators=(",", ":")).encode()
    return HttpResponse(status, content, b"content-type: application/json\r\n")


def _error(status: int, message: str) -> HttpResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return _json({"error": {"message": message, "type": kind}}, status)
