"""One HTTPS request to a secret manager, or to the metadata service of this machine."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1 << 20
_XML_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,80})</Code>")  # of an error of EC2


class SecretManagerError(Exception):
    """The secret could not be read; says why, and nothing of the secret."""


Ask = Callable[[str, str, Mapping[str, str], bytes], bytes]
"""(method, address, headers, body) -> the answer's body. Raises SecretManagerError."""


def ask(method: str, url: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Send a request; a redirection is not followed, as it would carry credentials elsewhere."""
    request = urllib.request.Request(url, body or None, dict(headers), method=method)
    is_metadata = url.startswith("http://")  # on this machine's own link: no proxy reaches it
    proxies: dict[str, str] | None = {} if is_metadata else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _NoRedirect)
    host = request.host
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return bytes(answer.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        words = _error_words(error.read(4096))
        raise SecretManagerError(f"{host} answers {error.code}{words}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise SecretManagerError(f"{host} cannot be reached: {reason}") from None


def ask_json(
    send: Ask, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
) -> dict[str, Any]:
    """As `send`; the answer is a JSON object."""
    return json_object(send(method, url, headers, body))


def json_object(answer: bytes) -> dict[str, Any]:
    """Raises SecretManagerError for an answer that is no JSON object."""
    try:
        value = json.loads(answer)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise SecretManagerError("the answer is no JSON object")
    return value


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        return None


def _error_words(body: bytes) -> str:
    """The service's own name of an error, such as AccessDeniedException; "" without one."""
    try:
        value = json.loads(body)
    except ValueError:
        found = _XML_CODE.search(body)
        return f" ({found[1].decode()})" if found else ""
    if not isinstance(value, dict):
        return ""
    inner = value.get("error")
    named = value.get("__type") or (
        (inner.get("status") or inner.get("code")) if isinstance(inner, dict) else inner
    )
    return f" ({str(named).rpartition('#')[2][:80]})" if named else ""
