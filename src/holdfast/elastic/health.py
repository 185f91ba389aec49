"""`/healthz` and `/metrics`: read-only, without a proof, on a listener of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


def application(
    health: Callable[[], dict[str, Any]], render_metrics: Callable[[], bytes]
) -> Starlette:
    """`health` and `render_metrics` answer from memory, within milliseconds."""

    async def healthz(_: Request) -> Response:
        return JSONResponse(health())

    async def metrics(_: Request) -> Response:
        return Response(render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return Starlette(routes=[Route("/healthz", healthz), Route("/metrics", metrics)])
