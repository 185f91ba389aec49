"""The HTTP side of the live page: static files, and states of runs as server-sent events.

Every path is read-only. Data needs the token: the page's address has it, the first answer turns it
into a cookie, and programs send it as `Authorization: Bearer TOKEN`. Static files hold no data.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from holdfast.report.dashboard.follower import Dashboard, PageState

STATIC = Path(__file__).parent / "static"
FILES = {
    "app.js": "text/javascript",
    "app.css": "text/css",
    "uplot.min.js": "text/javascript",
    "uplot.min.css": "text/css",
}
REFRESH_S = 0.5  # least time between two events of a page
KEEP_ALIVE_S = 15.0
HOSTS = ("127.0.0.1", "localhost", "::1")
"""A page of another site that resolves its own name to this machine has another host."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
REFUSAL = "The address lacks the token. Open the one that 'holdfast dashboard' printed.\n"


def make_app(dashboard: Dashboard, token: str, port: int) -> Starlette:
    """Return the application. port: names the cookie, since cookies of all ports are shared."""
    pages = _Pages(dashboard, token, f"holdfast_dashboard_{port}")
    return Starlette(
        routes=[
            Route("/", pages.index, methods=["GET"]),
            Route("/static/{name}", pages.static, methods=["GET"]),
            Route("/state", pages.state, methods=["GET"]),
            Route("/events", pages.events, methods=["GET"]),
        ]
    )


class _Pages:
    def __init__(self, dashboard: Dashboard, token: str, cookie: str) -> None:
        self._dashboard, self._token, self._cookie = dashboard, token, cookie

    async def index(self, request: Request) -> Response:
        if not self._may_read(request):
            return PlainTextResponse(REFUSAL, 403, HEADERS)
        page = Response((STATIC / "index.html").read_bytes(), 200, HEADERS, "text/html")
        page.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        return page

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in FILES:
            return PlainTextResponse("there is no such file\n", 404, HEADERS)
        return Response((STATIC / name).read_bytes(), 200, HEADERS, FILES[name])

    async def state(self, request: Request) -> Response:
        """Answer the state of a run, or the rows of all."""
        if not self._may_read(request):
            return PlainTextResponse(REFUSAL, 403, HEADERS)
        name = self._run_of(request)
        found = self._dashboard.rows() if name is None else self._dashboard.state(name)
        if found is None:
            return PlainTextResponse("there is no such run\n", 404, HEADERS)
        return JSONResponse(found, 200, HEADERS)

    async def events(self, request: Request) -> Response:
        """Answer a stream of changes of a run, or of the table of runs."""
        if not self._may_read(request):
            return PlainTextResponse(REFUSAL, 403, HEADERS)
        stream = self._stream(self._run_of(request))
        return StreamingResponse(stream, 200, HEADERS, "text/event-stream")

    async def _stream(self, name: str | None) -> AsyncIterator[bytes]:
        known, seen, silent_s = PageState(), -1, 0.0
        while not self._dashboard.is_closed:
            versions = self._dashboard.versions()
            if name is not None and name not in versions:
                yield b"event: missing\ndata: {}\n\n"
                return
            version = sum(versions.values()) + len(versions) if name is None else versions[name]
            if version != seen:
                seen, silent_s = version, 0.0
                if name is None:
                    text = json.dumps({"runs": self._dashboard.rows()}, allow_nan=False)
                else:
                    text = await run_in_threadpool(self._dashboard.news, name, known)
                yield f"data: {text}\n\n".encode()
            elif silent_s >= KEEP_ALIVE_S:
                silent_s = 0.0
                yield b": still here\n\n"
            await asyncio.sleep(REFRESH_S)
            silent_s += REFRESH_S

    def _run_of(self, request: Request) -> str | None:
        """Return the run that a request asks for; None for the table."""
        name = request.query_params.get("run")
        if name is None and self._dashboard.is_single:
            return next(iter(self._dashboard.names()))
        return name

    def _may_read(self, request: Request) -> bool:
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname
        if host not in HOSTS:
            return False
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = (request.query_params.get("token"), request.cookies.get(self._cookie), bearer)
        return any(
            hmac.compare_digest((each or "").encode(), self._token.encode()) for each in given
        )
