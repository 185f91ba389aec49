"""The HTTP side of the broker: paths and checks of the Open Service Broker API 2.17."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from base64 import b64decode
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.errors import UserError
from holdfast_platform.broker.instances import Instances, State
from holdfast_platform.broker.messages import (
    BrokerError,
    catalog,
    checked_id,
    plan_of,
    read_body,
    wanted_binding,
    wanted_instance,
)

USER = "holdfast"
OLDEST_MINOR = 13
"""Of version 2 of the API: the first one with what the catalogue says."""
MOST_BYTES = 256 * 1024
BODY_SECONDS = 10.0
IDENTITY = "X-Broker-API-Request-Identity"


def make_app(instances: Instances, password: str) -> ASGIApp:
    """Return the application. password: of the user `holdfast`, for HTTP Basic."""
    instance = "/v2/service_instances/{instance}"
    binding = instance + "/service_bindings/{binding}"
    paths = _Paths(instances)
    routes = [
        Route("/v2/catalog", paths.catalog, methods=["GET"]),
        Route(instance, paths.provision, methods=["PUT"]),
        Route(instance, paths.fetch, methods=["GET"]),
        Route(instance, paths.deprovision, methods=["DELETE"]),
        Route(f"{instance}/last_operation", paths.last_operation, methods=["GET"]),
        Route(binding, paths.bind, methods=["PUT"]),
        Route(binding, paths.fetch_binding, methods=["GET"]),
        Route(binding, paths.unbind, methods=["DELETE"]),
    ]
    handlers = dict.fromkeys((BrokerError, HTTPException, UserError, Exception), _answer_error)
    inner = Starlette(routes=routes, exception_handlers=handlers)
    return _Guard(inner, password)


class _Paths:
    def __init__(self, instances: Instances) -> None:
        self._instances = instances

    async def catalog(self, request: Request) -> Response:
        return JSONResponse(catalog())

    async def provision(self, request: Request) -> Response:
        name, body = checked_id(request.path_params["instance"]), await _body(request)
        _require_async(request)
        wanted = wanted_instance(body)
        known = await run_in_threadpool(self._instances.provision, name, wanted)
        if known.state is State.PROVISIONED:
            return JSONResponse({}, 200)
        return JSONResponse({"operation": known.operation}, 202)

    async def fetch(self, request: Request) -> Response:
        name = checked_id(request.path_params["instance"])
        known = await run_in_threadpool(self._instances.find, name)
        if known is None or known.state not in (State.PROVISIONED, State.KEPT):
            raise BrokerError(404, f"instance {name} is not provisioned")
        return JSONResponse(asdict(known.wanted))

    async def deprovision(self, request: Request) -> Response:
        name, query = checked_id(request.path_params["instance"]), request.query_params
        _, plan = plan_of(query.get("service_id"), query.get("plan_id"))
        _require_async(request)
        try:
            known = await run_in_threadpool(self._instances.deprovision, name, plan)
        except BrokerError as error:
            if error.status != 404:
                raise
            raise BrokerError(410, error.description) from None
        return JSONResponse({"operation": known.operation}, 202)

    async def last_operation(self, request: Request) -> Response:
        name = checked_id(request.path_params["instance"])
        known = await run_in_threadpool(self._instances.get, name)
        asked = request.query_params.get("operation", known.operation)
        if asked != known.operation:
            raise BrokerError(400, f"the newest operation of {known.id} is {known.operation}")
        return JSONResponse(known.last_operation())

    async def bind(self, request: Request) -> Response:
        names, wanted = _binding(request), wanted_binding(await _body(request))
        answer, is_new = await run_in_threadpool(self._instances.bind, *names, wanted)
        return JSONResponse(answer, 201 if is_new else 200)

    async def fetch_binding(self, request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(self._instances.binding, *_binding(request)))

    async def unbind(self, request: Request) -> Response:
        query = request.query_params
        _, plan = plan_of(query.get("service_id"), query.get("plan_id"))
        try:
            await run_in_threadpool(self._instances.unbind, *_binding(request), plan)
        except BrokerError as error:
            raise BrokerError(410, error.description) if error.status == 404 else error from None
        return JSONResponse({})


def _binding(request: Request) -> tuple[str, str]:
    return checked_id(request.path_params["instance"]), checked_id(request.path_params["binding"])


def _require_async(request: Request) -> None:
    if request.query_params.get("accepts_incomplete") != "true":
        raise BrokerError(
            422, "this service needs a client that accepts asynchronous work", "AsyncRequired"
        )


async def _body(request: Request) -> dict[str, Any]:
    """Read the JSON object of a request, which may be neither too long nor too slow."""

    async def read() -> bytes:
        parts = bytearray()
        async for part in request.stream():
            parts += part
            if len(parts) > MOST_BYTES:
                raise BrokerError(413, f"the body has more than {MOST_BYTES} bytes")
        return bytes(parts)

    try:
        return read_body(await asyncio.wait_for(read(), BODY_SECONDS))
    except TimeoutError:
        raise BrokerError(408, f"the body did not come within {BODY_SECONDS:g} s") from None


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # of the routes: no such path, no such method
        return _error(BrokerError(error.status_code, error.detail))
    if isinstance(error, BrokerError):
        return _error(error)
    known = isinstance(error, UserError)
    return _error(BrokerError(500, str(error) if known else "the broker failed; see its output"))


def _error(error: BrokerError) -> Response:
    named = {"error": error.error} if error.error else {}
    answer = JSONResponse(named | {"description": error.description}, error.status)
    if error.status == 401:
        answer.headers["WWW-Authenticate"] = 'Basic realm="holdfast"'
    if error.status in (401, 408, 412, 413):  # what is left of the body is not read
        answer.headers["Connection"] = "close"
    return answer


class _Guard:
    """Checks password and version before anything of a request is used."""

    def __init__(self, app: ASGIApp, password: str) -> None:
        self._app = app
        self._expected = hashlib.sha256(f"{USER}:{password}".encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        identity = headers.get(IDENTITY)

        async def send_with_identity(message: Message) -> None:
            if message["type"] == "http.response.start" and identity is not None:
                MutableHeaders(scope=message)[IDENTITY] = identity
            await send(message)

        try:
            authorization = headers.get("Authorization", "")
            # The digest of "user:password" of a header; the empty text's for another scheme.
            scheme, _, encoded = authorization.partition(" ")
            try:
                given = b64decode(encoded, validate=True) if scheme.lower() == "basic" else b""
            except ValueError:
                given = b""
            if not hmac.compare_digest(hashlib.sha256(given).digest(), self._expected):
                raise BrokerError(401, "user or password is wrong")
            version = re.fullmatch(r"2\.(\d{1,4})", headers.get("X-Broker-API-Version", ""))
            if version is None or int(version[1]) < OLDEST_MINOR:
                raise BrokerError(
                    412, f"X-Broker-API-Version is not 2.{OLDEST_MINOR} or a newer version 2"
                )
        except BrokerError as error:
            await _error(error)(scope, receive, send)
            return
        await self._app(scope, receive, send_with_identity)
