"""What a store's refusal is about, by the codes of three clouds."""

from __future__ import annotations

import pytest

from holdfast.errors import StoreError
from holdfast.wire.store.bucket_errors import translate_error

CLOCK, TOKEN, KEYS = "this machine's clock .*timedatectl", "has expired.*renew it", "refuses these"
REFUSALS = [
    (
        "s3",
        403,
        "<Code>RequestTimeTooSkewed</Code><ServerTime>2013-05-24T01:00:00Z</ServerTime>",
        CLOCK,
    ),
    ("s3", 403, "<Code>AccessDenied</Code><Message>Signature not yet current: 2026", CLOCK),
    ("s3", 400, "<Code>ExpiredToken</Code>", TOKEN + ".*AWS_SESSION_TOKEN"),
    ("s3", 400, "<Code>TokenRefreshRequired</Code>", TOKEN),
    ("s3", 403, "<Code>InvalidAccessKeyId</Code>", KEYS + ".*AWS_ACCESS_KEY_ID"),
    ("s3", 403, "", KEYS + r".* \(403\)"),
    ("gs", 400, '{"error":"invalid_grant","is":"Token must be a short-lived"', CLOCK),
    ("gs", 401, '{"code":401,"reason":"authError","message":"Invalid Credentials"}', TOKEN),
    ("gs", 403, "<Code>AccessDenied</Code>", KEYS + ".*GOOGLE_APPLICATION_CREDENTIALS"),
    ("az", 403, "<Code>AuthenticationFailed</Code>Request date header too old", CLOCK),
    (
        "az",
        403,
        "<Code>AuthenticationFailed</Code>Signature not valid in the specified time frame",
        TOKEN + ".*AZURE_STORAGE_SAS_TOKEN",
    ),
    ("az", 403, "<Code>AuthorizationPermissionMismatch</Code>", KEYS + ".*AZURE_STORAGE_ACCOUNT"),
]


@pytest.mark.parametrize(("scheme", "status", "body", "words"), REFUSALS)
def test_a_refusal_names_what_is_to_be_mended(
    scheme: str, status: int, body: str, words: str
) -> None:
    raised = Exception(f"Client error with status {status} Forbidden: {body}")
    with pytest.raises(StoreError, match=words) as caught:
        raise translate_error(raised, f"{scheme}://b/run")
    assert ("2013-05-24T01:00:00Z there" in str(caught.value)) == ("ServerTime" in body)
