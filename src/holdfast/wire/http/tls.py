"""TLS between the processes of a run. All of them derive one key and certificate from the secret.

Both ends of a connection show this certificate, and accept no other one. So there is no authority
to run, nothing to hand out, and no moment at which an outsider is accepted. A machine's clock does
not matter: the certificate is valid from 1970 to 9999. Only TLS 1.3 is spoken.

The proofs of requests (`auth`) stay: they fence generations, and no client relies on TLS alone.
"""

from __future__ import annotations

import hmac
import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.wire.http.refusals import RefusalReason
from holdfast.wire.secret import Secret

if TYPE_CHECKING:  # a mover without TLS starts without these
    import ssl

HANDSHAKE_RECORD = 0x16
"""First byte of everything that a client of TLS sends."""
UPGRADE_STATUS = 426
"""Status of the answer to a request without TLS, which `wants_tls` explains to the sender."""
UPGRADE_ANSWER = (
    b"HTTP/1.1 %d Upgrade Required\r\nupgrade: TLS/1.3\r\nconnection: upgrade, close\r\n"
    b"content-length: 0\r\n\r\n" % UPGRADE_STATUS
)
_KEY_PURPOSE = b"holdfast: key of the run's TLS certificate, 1"
# An Ed25519 private key as PKCS #8 (RFC 8410), before its 32 bytes.
_PKCS8_PREFIX = bytes.fromhex("302e020100300506032b657004220420")


def with_tls(secret: Secret) -> Secret:
    """Return the secret with the run's certificate: processes that get it speak TLS.

    The certificate is the same in every process: Ed25519 signs without randomness.
    """
    from datetime import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import NameOID

    if secret.uses_tls:
        return secret
    key = Ed25519PrivateKey.from_private_bytes(_private_key(secret))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a run of holdfast")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), serial_number=1)
    builder = builder.not_valid_before(datetime(1970, 1, 1))
    certificate = builder.not_valid_after(datetime(9999, 12, 31)).sign(key, None)
    return replace(secret, certificate=certificate.public_bytes(Encoding.DER))


def listener_context(secret: Secret) -> ssl.SSLContext | None:
    """Return the settings of a listener; None if the run's processes do not speak TLS."""
    if not secret.uses_tls:
        return None
    import ssl

    context = _context(secret, ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # connections stay open, so none is resumed
    return context


def make_client_context(secret: Secret) -> ssl.SSLContext:
    """Return the settings of a client, which take a millisecond: `Secret.client_tls` keeps them."""
    import ssl

    return _context(secret, ssl.PROTOCOL_TLS_CLIENT)


def is_tls(first: bytes) -> bool:
    """Return True if the first bytes of a connection begin a TLS handshake."""
    return first[:1] == bytes([HANDSHAKE_RECORD])


def refusal_reason(error: ssl.SSLError) -> RefusalReason:
    """Return what an error of a handshake, or after it, is counted as."""
    is_missing = error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE"
    is_wrong = error.reason == "CERTIFICATE_VERIFY_FAILED"
    return "wrong certificate" if is_missing or is_wrong else "not TLS"


def tls_errors(connection: socket.socket) -> tuple[type[OSError], ...]:
    """Return the errors that a connection has only if it is encrypted."""
    if type(connection) is socket.socket:
        return ()
    import ssl

    return (ssl.SSLError,)


def explain(error: ssl.SSLError) -> str:
    """Return why there is no TLS connection, for people."""
    return f"it speaks no TLS ({error.reason or error}): {SAME_EVERYWHERE}"


def wants_tls(address: str) -> str:
    """Return what the answer UPGRADE_STATUS of an address means, for people."""
    return f"{address} speaks TLS only: {SAME_EVERYWHERE}"


SAME_EVERYWHERE = (
    "set cluster.tls alike on all nodes of the run, and --tls of holdfast stage like it"
)


def _context(secret: Secret, protocol: int) -> ssl.SSLContext:
    import ssl

    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # every process of the run has the same certificate
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=secret.certificate)
    key = _PKCS8_PREFIX + _private_key(secret)
    text = ssl.DER_cert_to_PEM_cert(secret.certificate) + _to_pem(key)
    # OpenSSL reads a file only: an anonymous one in memory, which ends with its descriptor.
    fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, text.encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def _private_key(secret: Secret) -> bytes:
    """Derive the key. The messages of `auth` begin with a length, so none of them is the same."""
    return hmac.digest(secret.key, _KEY_PURPOSE, "sha256")


def _to_pem(key: bytes) -> str:
    from base64 import encodebytes

    return f"-----BEGIN PRIVATE KEY-----\n{encodebytes(key).decode()}-----END PRIVATE KEY-----\n"
