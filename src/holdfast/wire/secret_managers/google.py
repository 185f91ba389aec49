"""Google Secret Manager: `google:projects/PROJECT/secrets/NAME`, with `/versions/N` or the newest.

The token is CLOUDSDK_AUTH_ACCESS_TOKEN, or that of the machine's service account.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from holdfast.wire.secret_managers.request import Ask, SecretManagerError, ask_json

SERVICE_URL = "https://secretmanager.googleapis.com/"
METADATA_HOST = "metadata.google.internal"
TOKEN_PATH = "computeMetadata/v1/instance/service-accounts/default/token"


def read(name: str, environ: Mapping[str, str], ask: Ask) -> str:
    """Return the text of a secret. Raises SecretManagerError."""
    token = environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN", "")
    if not token:
        host = environ.get("GCE_METADATA_HOST") or METADATA_HOST
        url = f"http://{host}/{TOKEN_PATH}"
        token = str(ask_json(ask, "GET", url, {"Metadata-Flavor": "Google"}).get("access_token"))
    base = environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER") or SERVICE_URL
    version = name if "/versions/" in name else f"{name}/versions/latest"
    url = f"{base.rstrip('/')}/v1/{version}:access"
    payload = ask_json(ask, "GET", url, {"authorization": f"Bearer {token}"}).get("payload", {})
    try:
        data = base64.b64decode(payload["data"], validate=True)
        checksum = int(payload.get("dataCrc32c", _crc32c(data)))
        text = data.decode()
    except (KeyError, TypeError, ValueError):
        raise SecretManagerError("the answer holds no text") from None
    if checksum != _crc32c(data):
        raise SecretManagerError("the answer's checksum is wrong")
    return text


def _crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), which `zlib` does not have."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
