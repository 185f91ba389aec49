"""Azure Key Vault: `azure:VAULT/NAME`, or `azure:HOST/NAME` for a vault of another cloud.

The token is that of the machine's managed identity; AZURE_CLIENT_ID chooses one of several.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from holdfast.wire.secret_managers.request import Ask, SecretManagerError, ask_json

VAULT_DOMAIN = "vault.azure.net"
METADATA_URL = "http://169.254.169.254"
METADATA_VERSION, VAULT_VERSION = "2018-02-01", "7.4"


def read(name: str, environ: Mapping[str, str], ask: Ask) -> str:
    """Return the text of a secret. Raises SecretManagerError."""
    vault, _, secret = name.partition("/")
    host = vault if "." in vault else f"{vault}.{VAULT_DOMAIN}"
    resource = "https://" + host.partition(".")[2]
    metadata = environ.get("AZURE_POD_IDENTITY_AUTHORITY_HOST") or METADATA_URL
    url = (
        f"{metadata.rstrip('/')}/metadata/identity/oauth2/token"
        f"?api-version={METADATA_VERSION}&resource={quote(resource, safe='')}"
    )
    if client := environ.get("AZURE_CLIENT_ID"):
        url += f"&client_id={quote(client, safe='')}"
    token = ask_json(ask, "GET", url, {"Metadata": "true"}).get("access_token")
    address = f"https://{host}/secrets/{quote(secret)}?api-version={VAULT_VERSION}"
    value = ask_json(ask, "GET", address, {"authorization": f"Bearer {token}"}).get("value")
    if not isinstance(value, str):
        raise SecretManagerError("the answer holds no text")
    return value
