"""`/healthz` and `/metrics`: read-only, without a proof, on a listener of their own.

Whoever can reach it may read it, and nothing else: other paths and methods are refused and counted.
The metrics are not rendered more often than twice a second, however often they are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from holdfast.wire.doors import Doors
from holdfast.wire.refusals import HEALTH, Refusals

RENDER_SECONDS = 0.5
"""A rendering may be this old: a stranger who asks again and again costs the agent little."""


def application(
    health: Callable[[], dict[str, Any]],
    render_metrics: Callable[[], bytes],
    refusals: Refusals | None = None,
) -> Starlette:
    """`health` and `render_metrics` answer from memory, within milliseconds."""
    doors = Doors(HEALTH, refusals)
    rendered: tuple[float, bytes] | None = None

    async def healthz(_: Request) -> Response:
        return JSONResponse(health())

    async def metrics(_: Request) -> Response:
        nonlocal rendered
        now = time.monotonic()
        if rendered is None or now - rendered[0] > RENDER_SECONDS:
            rendered = now, render_metrics()
        return Response(rendered[1], media_type="text/plain; version=0.0.4; charset=utf-8")

    async def nothing(_: Request, error: Exception) -> Response:
        doors.refusals.count(HEALTH, "no such path")
        status = getattr(error, "status_code", 404)
        return Response(status_code=status, headers={"connection": "close"})

    made = Starlette(
        routes=[Route("/healthz", healthz), Route("/metrics", metrics)],
        exception_handlers={404: nothing, 405: nothing},
    )
    made.router.redirect_slashes = False  # a redirection repeats what it was asked
    made.state.doors = doors
    return made
