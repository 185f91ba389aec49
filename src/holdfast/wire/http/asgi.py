"""Servers for people and other platforms: ASGI applications under uvicorn, which are extras."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from socket import socket
from typing import Any

from holdfast.errors import UserError

MAX_CONNECTIONS = 64


def require_web_packages(command: str, extra: str) -> None:
    """Raises UserError if a package of the extra is missing. command: that needs it."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"this needs the package {package}",
                where=command,
                remedy=f"install it with: pip install 'holdfast[{extra}]'",
            )


def serve_asgi(web_app: Any, bound: socket, *, close_timeout_s: int = 5) -> None:
    """Serve an ASGI application on a listening socket until SIGINT or SIGTERM.

    close_timeout_s: seconds that open requests get at the end."""
    import uvicorn

    settings = uvicorn.Config(
        web_app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=close_timeout_s,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn sends itself the signal again at its end
    asyncio.run(uvicorn.Server(settings).serve(sockets=[bound]))
