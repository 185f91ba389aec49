"""A bucket client's errors, each as one sentence: what is wrong, where, and what would help.

obstore's messages run over many lines and quote entire requests, which may hold a signed address.
So only a status, a code of the store's, or a known kind of failure is passed on.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from holdfast.errors import HoldfastError, OutOfSpaceError, StoreError

_STATUS = re.compile(r"\b(?:status(?: code)?:?\s*|HTTP status \w+ error \()(\d{3})", re.IGNORECASE)
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_FULL_CODES = ("QuotaExceeded", "InsufficientStorage", "EntityTooLarge", "XMinioStorageFull")
_REFUSED_CODES = (
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "AuthenticationFailed",
    "AuthorizationFailure",
)
_REGION_CODES = (
    "PermanentRedirect",
    "TemporaryRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
)
_CLOCK = re.compile(
    "RequestTimeTooSkewed|RequestExpired|RequestInTheFuture|Signature not yet current|"
    "Signature expired|date header (?:too old|is too old)|difference between the request time|"
    "Token must be a short-lived"
)
"""What S3, Azure and Google say of a request that is signed at another time than the server's."""
_TOKEN = re.compile(
    "ExpiredToken|TokenRefreshRequired|InvalidToken|TokenExpired|[Tt]oken (?:has|is) expired|"
    "expired or revoked|not valid in the specified time frame|Lifetime validation failed|"
    "invalid_grant|Invalid Credentials|authError|InvalidAuthenticationInfo"
)
"""What they say of a session token, an OAuth token or a SAS that ran out."""
_SERVER_TIME = re.compile(r"<ServerTime>([0-9TZ:.-]{1,40})</ServerTime>")
_VARIABLES = {
    "s3": ("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS", "gcloud auth application-default login"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"),
}
"""Scheme -> variables of credentials; where a token comes from."""
_ADDRESS = re.compile(r"https?://[^/\s\"'()?]+")
"""The endpoint in an error's text; what follows it may hold secrets."""
_AUTHORITY_REMEDY = "name the file of its authority's certificate with ?ca=<path>"
# the first that fits; as obstore's debug text names them
_KINDS = tuple(
    (re.compile(pattern), said)
    for pattern, said in (
        (r"kind: Timeout|TimedOut|deadline has elapsed", "the endpoint does not answer in time"),
        (
            r"InvalidCertificate|UnknownIssuer|invalid peer",
            "the endpoint's certificate is not trusted",
        ),
        (r"dns error|failed to lookup", "the endpoint's name cannot be found"),
        (r"InvalidMessage|InvalidContentType", "the endpoint does not speak TLS"),
        (r"kind: Connect|ConnectError|refused", "the endpoint cannot be reached"),
        (
            r"kind: (?:Request|Interrupted|Decode|Body)|Incomplete|ConnectionReset|BrokenPipe",
            "the endpoint broke off in the middle of an answer",
        ),
    )
)


def translate_error(error: Exception, where: str, *, missing: bool = False) -> HoldfastError:
    """The error to raise instead. `missing`: the store said that something is not there, where
    that can only be the bucket."""
    text = str(error)
    kind = type(error).__name__
    code = match[1] if (match := _CODE.search(text)) else ""
    status = match[1] if (match := _STATUS.search(text)) else ""
    if missing or is_bucket_missing(text):
        return StoreError(
            "there is no such bucket", where=where, remedy="create it, or name another"
        )
    if "169.254.169.254" in text or "metadata.google" in text or "169.254.170." in text:
        return StoreError("no credentials were found", where=where, remedy=_set_credentials(where))
    if code in _REGION_CODES or "incorrectly configured region" in text:
        return StoreError(
            "the bucket is in another region, or behind another endpoint",
            where=where,
            remedy="name them with ?region=<its region> and ?endpoint=<its address>",
        )
    is_refused = kind in ("PermissionDeniedError", "UnauthenticatedError") or code in _REFUSED_CODES
    is_late = status == "400" and (_CLOCK.search(text) or _TOKEN.search(text))
    if is_refused or is_late or status in ("401", "403"):
        return _refused_error(text, code, status, where)
    if code in _FULL_CODES or status == "507":
        return OutOfSpaceError(
            "the bucket is full", where=where, remedy="free some space, or use another bucket"
        )
    return _unreachable_error(text, code, status, where)


def _refused_error(text: str, code: str, status: str, where: str) -> StoreError:
    """Return the error of a request that the store does not admit: clock, token or credentials."""
    said = f" ({code or status})" if code or status else ""
    what, remedy = f"the bucket refuses these credentials{said}", _set_credentials(where)
    if _CLOCK.search(text):
        there = f", and {match[1]} there" if (match := _SERVER_TIME.search(text)) else ""
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} here{there}"
        what = f"the bucket refuses requests by this machine's clock{said}: it is {now}"
        remedy = "set the clock, as with: timedatectl set-ntp true"
    elif _TOKEN.search(text):
        _, token = _VARIABLES.get(where.partition(":")[0], _VARIABLES["s3"])
        what = f"the token of these credentials has expired, or is no longer valid{said}"
        remedy = f"renew it ({token}), together with the credentials that belong to it"
    return StoreError(what, where=where, remedy=remedy)


def _set_credentials(where: str) -> str:
    names, _ = _VARIABLES.get(where.partition(":")[0], _VARIABLES["s3"])
    return f"set them in the environment ({names}), or name a file of them with ?credentials=<path>"


def is_bucket_missing(text: str) -> bool:
    """Return True if a store's "not there" is about the bucket (S3, Azure; Google says it in
    words)."""
    code = match[1] if (match := _CODE.search(text)) else ""
    return code in ("NoSuchBucket", "ContainerNotFound") or "specified bucket does not" in text


def _unreachable_error(text: str, code: str, status: str, where: str) -> StoreError:
    """Return the error of an unreachable, slow or failing store, which may have recovered by a
    later attempt."""
    if status or code:
        said = " ".join(part for part in (status, code) if part)
        return StoreError(f"the store answers with an error ({said})", where=where)
    for pattern, said in _KINDS:
        if pattern.search(text):
            remedy = _AUTHORITY_REMEDY if "certificate" in said else None
            if asked := _ADDRESS.search(text):  # the cloud's own stands in no address of the user
                said = said.replace("the endpoint", f"the endpoint {asked[0]}", 1)
            return StoreError(said, where=where, remedy=remedy)
    return StoreError("the store fails in a way that has no name here", where=where)
