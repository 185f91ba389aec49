"""The local folder of a run whose run store is a bucket.

Such a run has a folder of its own on each node, below the user's cache folder. It holds what the
bucket must not or need not have: the run's secret, logs, files of trackers. Its name follows from
the bucket's address, so every command on a node finds the same one.
"""

from __future__ import annotations

import hashlib
import os
import re
from urllib.parse import parse_qsl, urlsplit

PLACE_OPTIONS = ("endpoint", "account")
"""Options of an address that decide which bucket it is. The other options say how it is reached."""
SCHEMES = ("s3", "gs", "az")


def is_bucket(place: str) -> bool:
    """Return True for the address of a bucket, False for the path of a folder."""
    return place.partition("://")[0] in SCHEMES and "://" in place


def local_run_folder(address: str) -> str:
    """Return the path of this node's folder for the run at a bucket's address."""
    parts = urlsplit(address)
    prefix = parts.path.strip("/")
    options = dict(parse_qsl(parts.query))
    identity = [parts.scheme, parts.netloc, prefix, *(options.get(n, "") for n in PLACE_OPTIONS)]
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:12]
    last = prefix.rpartition("/")[2] or parts.netloc
    name = re.sub(r"[^A-Za-z0-9._-]", "_", last)[:80]
    return os.path.join(cache_folder(), "holdfast", "runs", f"{name}-{digest}")


def dataset_of_run(address: str) -> str:
    """Return the place of the dataset of a run in a bucket that names none: below the run's own
    address. "" if the address seals what is stored, because a dataset cannot be sealed."""
    place, mark, options = address.partition("?")
    return (
        "" if "seal" in dict(parse_qsl(options)) else f"{place.rstrip('/')}/dataset{mark}{options}"
    )


def cache_folder() -> str:
    """Return the user's folder for what can be made again: $XDG_CACHE_HOME or ~/.cache."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return named if os.path.isabs(named) else os.path.expanduser("~/.cache")
