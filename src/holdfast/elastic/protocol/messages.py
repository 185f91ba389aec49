"""What all messages have in common: they travel as JSON objects, most of them as HTTP bodies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from holdfast.core.json_parsing import JsonObject
from holdfast.wire.http.server import Handler

Request = TypeVar("Request")


class Message(Protocol):
    """A frozen value that another process reads."""

    def to_json(self) -> JsonObject: ...


def handler_of(
    parse: Callable[[Mapping[str, Any]], Request],
    answer: Callable[[int, Request], Awaitable[Message]],
) -> Handler:
    """Return the HTTP handler of one kind of request.

    parse: raises KeyError, TypeError and ValueError if the request is malformed; the sender is then
    answered which key or value is wrong. answer: gets the sender's generation, too.
    """

    async def handle(generation: int, body: Mapping[str, Any]) -> JsonObject:
        return (await answer(generation, parse(body))).to_json()

    return handle
