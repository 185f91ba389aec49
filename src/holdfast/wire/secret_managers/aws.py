"""AWS Secrets Manager: `aws:NAME`, a name or ARN in the region of AWS_REGION or of the machine.

Credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or those of the container (ECS, EKS Pod
Identity), or those of the machine's role (IMDSv2). Requests are signed by Signature Version 4.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from holdfast.wire.secret_managers.request import Ask, SecretManagerError, ask_json, json_object

SERVICE = "secretsmanager"
METADATA_URL = "http://169.254.169.254"
CONTAINER_URL = "http://169.254.170.2"
TOKEN_LIFETIME_S = "300"


@dataclass(frozen=True)
class Credentials:
    key_id: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)


def read(name: str, environ: Mapping[str, str], ask: Ask) -> str:
    """Return the text of a secret. Raises SecretManagerError."""
    headers = {
        "content-type": "application/x-amz-json-1.1",
        "x-amz-target": f"{SERVICE}.GetSecretValue",
    }
    region = name.split(":")[3] if name.startswith("arn:") else ""
    service = AwsService(SERVICE, environ, ask, region, endpoint="SECRETS_MANAGER")
    found = json_object(service.post(headers, json.dumps({"SecretId": name}).encode()))
    value = found.get("SecretString")
    if not isinstance(value, str):
        raise SecretManagerError("the secret is no text")
    return value


class AwsService:
    """A service of AWS that takes signed POSTs to "/".

    region: if the environment names none; "": that of this machine. endpoint: another address is
    in the variable AWS_ENDPOINT_URL_<endpoint>; "": the service's name. host: the part before
    `.<region>.amazonaws.com`; "": the service's name.
    """

    def __init__(
        self,
        service: str,
        environ: Mapping[str, str],
        ask: Ask,
        region: str = "",
        endpoint: str = "",
        host: str = "",
    ) -> None:
        self._service, self._environ, self._ask = service, environ, ask
        self._metadata = _Metadata(environ, ask)
        self.region = (
            environ.get("AWS_REGION")
            or environ.get("AWS_DEFAULT_REGION")
            or region
            or self._metadata.get("placement/region")
        )
        self._url = (
            environ.get(f"AWS_ENDPOINT_URL_{endpoint or service.upper()}")
            or environ.get("AWS_ENDPOINT_URL")
            or f"https://{host or service}.{self.region}.amazonaws.com"
        ).rstrip("/") + "/"

    def post(self, headers: Mapping[str, str], body: bytes) -> bytes:
        """Return the answer's body. Raises SecretManagerError."""
        found = dict(headers) | {
            "host": urlsplit(self._url).netloc,
            "x-amz-date": datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"),
        }
        credentials = _credentials(self._environ, self._ask, self._metadata)
        if credentials.token:
            found["x-amz-security-token"] = credentials.token
        found["authorization"] = authorization(credentials, self.region, found, body, self._service)
        return self._ask("POST", self._url, found, body)


def authorization(
    credentials: Credentials,
    region: str,
    headers: Mapping[str, str],
    body: bytes,
    service: str = SERVICE,
) -> str:
    """Return Signature Version 4 of a POST to "/". headers: by name in small letters, sorted."""
    names = sorted(headers)
    signed = ";".join(names)
    lines = "".join(f"{name}:{headers[name].strip()}\n" for name in names)
    request = f"POST\n/\n\n{lines}\n{signed}\n{hashlib.sha256(body).hexdigest()}"
    moment = headers["x-amz-date"]
    scope = f"{moment[:8]}/{region}/{service}/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{credentials.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    return (
        f"AWS4-HMAC-SHA256 Credential={credentials.key_id}/{scope}, "
        f"SignedHeaders={signed}, Signature={signature}"
    )


def _credentials(environ: Mapping[str, str], ask: Ask, metadata: _Metadata) -> Credentials:
    if environ.get("AWS_ACCESS_KEY_ID"):
        return Credentials(
            environ["AWS_ACCESS_KEY_ID"],
            environ.get("AWS_SECRET_ACCESS_KEY", ""),
            environ.get("AWS_SESSION_TOKEN", ""),
        )
    path = environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "")
    url = environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI") or (path and CONTAINER_URL + path)
    if url:
        token = environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN", "")
        if file := environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
            try:
                token = Path(file).read_text().strip()
            except OSError as error:
                raise SecretManagerError(f"{file}: {error.strerror}") from None
        found = ask_json(ask, "GET", url, {"authorization": token} if token else {})
    else:
        role = metadata.get("iam/security-credentials/").split("\n")[0]
        found = metadata.get_json(f"iam/security-credentials/{role}")
    try:
        return Credentials(found["AccessKeyId"], found["SecretAccessKey"], found.get("Token", ""))
    except KeyError:
        raise SecretManagerError("the machine's role has no credentials") from None


class _Metadata:
    """The machine's metadata service, asked only for what the environment does not say."""

    def __init__(self, environ: Mapping[str, str], ask: Ask) -> None:
        url = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or METADATA_URL
        self._url = url.rstrip("/")
        self._ask = ask
        self._token = ""

    def get(self, path: str) -> str:
        return self._ask("GET", self._address(path), self._headers(), b"").decode()

    def get_json(self, path: str) -> dict[str, Any]:
        return ask_json(self._ask, "GET", self._address(path), self._headers())

    def _address(self, path: str) -> str:
        return f"{self._url}/latest/meta-data/{path}"

    def _headers(self) -> dict[str, str]:
        if not self._token:
            lifetime = {"x-aws-ec2-metadata-token-ttl-seconds": TOKEN_LIFETIME_S}
            self._token = self._ask("PUT", f"{self._url}/latest/api/token", lifetime, b"").decode()
        return {"x-aws-ec2-metadata-token": self._token}
