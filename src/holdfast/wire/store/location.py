"""The location of a run store, as text: a folder's path, or the address of a bucket.

    runs/mine, file:///shared/runs/mine
    s3://bucket/prefix, gs://bucket/prefix, az://container/prefix

A bucket's further settings follow its name as options, `s3://b/p?endpoint=https://host&region=x`. A
location stands in run files and logs, so it holds no secret. Credentials come from the environment,
as each cloud's own tools read them, or from a file that it names. Connections are encrypted; an
endpoint that is not has to be allowed by name.

With `seal`, checkpoints are encrypted before they leave (`wire/store/encrypted_store.py`). A folder
may say itself that its checkpoints are (`folder_seal.py`).

A store is trusted only after `probe`: some servers accept create-if-absent and overwrite.
"""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from holdfast.borders import Border
from holdfast.errors import CorruptError, OtherKeyError, StoreError
from holdfast.wire.store.folder_seal import read_seal
from holdfast.wire.store.object_version import Objects
from holdfast.wire.store.run_store import (
    AlreadyExistsError,
    FolderStore,
    RunStore,
    translate_os_error,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from holdfast.wire.store.encrypted_store import EncryptedStore

SCHEMES = ("s3", "gs", "az")
FILE_OPTIONS = frozenset({"seal", "compress"})
_ALL_OPTIONS = FILE_OPTIONS | {"credentials", "ca", "timeout", "retries"}
ADDRESS_OPTIONS = {
    scheme: Border(f"options of a {scheme}:// address", options, entry="option")
    for scheme, options in (
        ("s3", _ALL_OPTIONS | {"endpoint", "region", "virtual_host", "allow_http", "profile"}),
        ("gs", _ALL_OPTIONS),
        ("az", _ALL_OPTIONS | {"endpoint", "account", "allow_http"}),
        ("file", FILE_OPTIONS),
    )
}
SEAL_KEY_VARIABLE = "HOLDFAST_SEAL_KEY"
"""The environment's variable that `seal=env` reads."""
SEAL_BY_NAME = "env"
_SECRET_WORDS = ("key", "secret", "token", "password", "sas")
_AZURE_NAMES = {
    "AZURE_STORAGE_ACCOUNT_NAME": "account_name",
    "AZURE_STORAGE_ACCOUNT_KEY": "account_key",
    "AZURE_STORAGE_SAS_TOKEN": "sas_key",
}
PROBE_PREFIX = "probe/"
PROBE_WRITERS = 16


class UnfitStoreError(StoreError):
    """The store answers, and does not keep what a run rests on: it must not be used."""


@dataclass(frozen=True)
class BucketLocation:
    """A parsed location. `timeout` bounds one request, in seconds. A request that fails or is not
    answered is repeated `retries` times, for at most twice the time-out after the first."""

    scheme: str
    name: str
    prefix: str
    endpoint: str = ""
    region: str = ""
    account: str = ""
    virtual_host: bool = False
    allow_http: bool = False
    credentials: str = ""
    profile: str = "default"
    ca: str = ""
    timeout: float = 30.0
    retries: int = 4
    seal: str = ""
    compress: str = ""

    @property
    def where(self) -> str:
        return f"{self.scheme}://{self.name}" + (f"/{self.prefix}" if self.prefix else "")

    @property
    def patience_s(self) -> float:
        """Seconds after which a request that is not answered is given up, at most."""
        return self.timeout * min(3, 1 + self.retries)


SECOND_PLACE_LINK = "fallback"
"""Name of a link in the run folder, which names the second place while a run waits for room."""


def second_place(store: RunStore, location: str) -> str:
    """Return the location of the second place of a run's last state: where the link in the run
    folder leads, otherwise `location`."""
    folder = getattr(getattr(store, "inner", store), "folder", None)
    try:
        return location if folder is None else str((folder / SECOND_PLACE_LINK).readlink())
    except OSError:
        return location


def open_store(location: str | Path) -> RunStore:
    """The run store at `location`; nothing is asked of it yet.

    Raises StoreError for a location that cannot be right, and where the client is not installed.
    """
    text = str(location)
    if "://" not in text:
        return _open_folder(Path(text))
    bucket = parse_location(text)
    if bucket.scheme == "file":
        return _open_folder(Path(f"/{bucket.prefix}"), bucket)
    _require_package("obstore", "bucket", bucket.where)
    from holdfast.wire.store.bucket import BucketStore

    store = BucketStore(_object_store(bucket), bucket.where, patience_s=bucket.patience_s)
    return _wrap_encrypted(bucket, store)


def open_objects(bucket: BucketLocation) -> Objects:
    """Return the objects of a bucket that other programs have written. Raises StoreError."""
    _require_package("obstore", "bucket", bucket.where)
    from holdfast.wire.store.bucket_objects import BucketObjects

    return BucketObjects(_object_store(bucket), bucket.where, bucket.patience_s)


def _require_package(package: str, extra: str, where: str) -> None:
    """Raises StoreError, naming the extra, where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise _wrong(
            f"this needs the package {package}",
            where,
            f"install it with: pip install 'holdfast[{extra}]'",
        )


def _open_folder(folder: Path, options: BucketLocation | None = None) -> RunStore:
    """Open the store in a folder, with the key that it was sealed with if it is."""
    store, seal = FolderStore(folder), read_seal(folder)
    opened = store if options is None else _wrap_encrypted(options, store)
    if seal is None:
        return opened
    from holdfast.wire.store.encrypted_store import EncryptedStore

    source = options.seal if options and options.seal else seal.source
    if not isinstance(opened, EncryptedStore):
        if (
            source != SEAL_BY_NAME
            and SEAL_KEY_VARIABLE in os.environ
            and not os.path.exists(source)
        ):
            source = SEAL_BY_NAME  # on another machine the key may have another path
        try:
            opened = seal_store(store, source)
        except StoreError as error:
            raise StoreError(
                f"the checkpoints here are sealed, and their key cannot be read: {error.message}",
                where=f"{folder}: {error.where}",
                remedy=f"put the key there, or into {SEAL_KEY_VARIABLE}",
            ) from None
    if seal.key_id and opened.key_id.hex() != seal.key_id:
        place = SEAL_KEY_VARIABLE if source == SEAL_BY_NAME else source
        raise OtherKeyError(
            f"the checkpoints here are sealed with another key than that of {place}",
            where=str(folder),
            remedy="put the key that the run was begun with there",
        )
    return opened


def _wrap_encrypted(bucket: BucketLocation, store: RunStore) -> RunStore:
    """The store itself, or where the location asks for it one that seals what goes into it."""
    if bucket.compress and not bucket.seal:
        raise StoreError("compress needs seal", where=bucket.where, remedy="add seal=<path>")
    if not bucket.seal:
        return store
    _require_package("cryptography", "seal", bucket.where)
    if bucket.compress:
        _require_package("zstandard", "seal", bucket.where)
    return seal_store(store, bucket.seal, compress=bool(bucket.compress))


def seal_store(store: RunStore, source: str, *, compress: bool = False) -> EncryptedStore:
    """Return a store that seals what goes into another one. source: the file of the key, or "env".
    Raises StoreError if there is no key."""
    by_name = source == SEAL_BY_NAME
    where = SEAL_KEY_VARIABLE if by_name else source
    _require_package("cryptography", "seal", where)
    from holdfast.wire.store.encrypted_store import KEY_BYTES, EncryptedStore

    text = os.environ.get(SEAL_KEY_VARIABLE, "") if by_name else _read_credentials(Path(source))
    key = b""
    with suppress(ValueError):
        key = bytes.fromhex(text.strip())
    if len(key) != KEY_BYTES:
        raise _wrong(
            "there is no key here",
            where,
            f"put {2 * KEY_BYTES} hexadecimal digits there, as openssl rand -hex 32 does",
        )
    return EncryptedStore(store, key, compress=compress)


def parse_location(location: str) -> BucketLocation:
    """Raises StoreError naming what is wrong; never repeats an option's value."""
    where = re.sub("://[^/]*@", "://", re.split("[?#]", location)[0])
    try:
        parts = urlsplit(location)
        path = unquote(parts.path, errors="strict")
    except ValueError:  # of brackets, and of bytes that are not UTF-8
        raise _wrong(
            "this is no address", where, "write s3://bucket/prefix, and % as %25"
        ) from None
    scheme, is_file = parts.scheme, parts.scheme == "file"
    prefix = path.strip("/") if is_file else path.removeprefix("/").removesuffix("/")
    pairs = [pair.partition("=") for pair in parts.query.split("&") if pair]
    options = {unquote(name): unquote(value) for name, _, value in pairs}
    if "@" in parts.netloc or any(
        word in name.lower()
        for word in _SECRET_WORDS
        for name in options.keys() - ADDRESS_OPTIONS.get(scheme, ADDRESS_OPTIONS["s3"]).used
    ):
        raise _wrong(
            "a location must hold no secret",
            where,
            "leave credentials in the environment, or name their file with ?credentials=<path>",
        )
    if scheme not in ADDRESS_OPTIONS:
        remedy = "use a folder, or an address that begins with s3://, gs:// or az://"
        raise _wrong(f"{scheme}:// is no kind of run store", where, remedy)
    if is_file and (parts.netloc not in ("", "localhost") or not path):
        remedy = "write file:///shared/runs/mine"
        raise _wrong("a file's address has no host and a whole path", where, remedy)
    if not is_file and not parts.netloc:
        raise _wrong("the bucket's name is missing", where, f"write {scheme}://bucket/prefix")
    if not is_file and not re.fullmatch(r"\w[\w.-]*", parts.netloc):
        remedy = "write a server as ?endpoint=https://HOST:PORT, and the bucket without a port"
        raise _wrong(f"{parts.netloc!r} is no name of a bucket", where, remedy)
    if "#" in location:
        raise _wrong("what follows # would be left out", where, "write a # of a name as %23")
    if "?" in parts.query:
        remedy = "join options with &, and write a ? of a value as %3F"
        raise _wrong("the address has a second ?", where, remedy)
    used = "|".join(sorted(ADDRESS_OPTIONS[scheme].used))
    if found := re.search(f"&({used})=", parts.path):
        remedy = "begin the options with ?, and write a & of a name as %26"
        raise _wrong(f"the option {found[1]} is in the path", where.partition("&")[0], remedy)
    if re.search("%(?![0-9A-Fa-f]{2})", location):
        raise _wrong("a % has no two hexadecimal digits", where, "write a % of a name as %25")
    if re.search(r"[\x00-\x1f\x7f]", location + path) or location != location.strip():
        raise _wrong("the address has a control character or a space around it", where, "remove it")
    if not is_file and prefix and {"", ".", ".."}.intersection(prefix.split("/")):
        raise _wrong("the prefix has //, . or .. in it", where, "write the prefix that is meant")
    if len(options) < len(pairs):
        raise _wrong("an option is named twice", where, "name each option once")
    border = ADDRESS_OPTIONS[scheme]
    remedy = f"the options of {scheme}:// are {', '.join(sorted(border.used))}"
    border.check(dict.fromkeys(options, True), where, StoreError, remedy)
    values: dict[str, Any] = {name: _value(name, each, where) for name, each in options.items()}
    _check_endpoint(values.get("endpoint", ""), where)
    return BucketLocation(scheme, parts.netloc, prefix, **values)


def _value(name: str, value: str, where: str) -> Any:
    if name in ("virtual_host", "allow_http"):
        if value not in ("true", "false"):
            raise _wrong(f"{name} is not true or false", where, f"write {name}=true")
        return value == "true"
    if name == "timeout":
        with suppress(ValueError):
            if 0 < float(value) <= 3600:
                return float(value)
        raise StoreError("timeout is not a number of seconds", where=where, remedy="use timeout=30")
    if name == "region" and re.search("[^A-Za-z0-9-]", value):
        raise _wrong("region is no name of a region", where, "use region=us-east-1")
    if name == "compress" and value != "zstd":
        raise StoreError("compress knows zstd only", where=where, remedy="use compress=zstd")
    if name == "retries":
        if not value.isdecimal() or int(value) > 100:
            raise StoreError("retries is not a number", where=where, remedy="use retries=4")
        return int(value)
    return value


def check_location(location: str) -> None:
    """Raises StoreError for an address that cannot be right, before it is written down anywhere."""
    if "://" in location:
        parse_location(location)


def _check_endpoint(endpoint: str, where: str) -> None:
    """An endpoint is shown in messages and kept in the run file."""
    if any(sign in endpoint for sign in "@?#"):
        raise _wrong(
            "the endpoint holds more than an address",
            where,
            "leave users, passwords and signatures to the environment or a credentials file",
        )
    with suppress(ValueError):  # of a port, or of brackets
        parts, begins = urlsplit(endpoint), re.match(r"https?://\S+$", endpoint)
        if not endpoint or (begins and parts.hostname and parts.port != 0):
            return
    raise _wrong("the endpoint is no address", where, "write it as https://HOST:PORT")


def _wrong(what: str, where: str, remedy: str) -> StoreError:
    return StoreError(what, where=where, remedy=remedy)


def find_endpoint(location: str) -> str:
    """Return the endpoint of a bucket's address, "" for the cloud's own. Raises StoreError."""
    return _endpoint(parse_location(location))


# --- clients --------------------------------------------------------------------------------
def _object_store(bucket: BucketLocation) -> ObjectStore:
    from obstore.exceptions import BaseError
    from obstore.store import AzureStore, GCSStore, S3Store

    endpoint = _endpoint(bucket)
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=bucket.timeout),
        "connect_timeout": timedelta(seconds=min(5.0, bucket.timeout)),
        "allow_http": endpoint.startswith("http://"),  # whatever the environment says
    }
    if bucket.ca:
        options["root_certificate"] = _read_credentials(Path(bucket.ca), private=False)
    common: dict[str, Any] = {
        "prefix": bucket.prefix or None,
        "client_options": options,
        "retry_config": {
            "max_retries": bucket.retries,
            "retry_timeout": timedelta(seconds=2 * bucket.timeout),
            "backoff": {
                "init_backoff": timedelta(seconds=0.1),
                "max_backoff": timedelta(seconds=min(5.0, bucket.timeout)),
                "base": 2,
            },
        },
    }
    try:
        if bucket.scheme == "gs":
            google = _google_options(bucket)
            return GCSStore(bucket.name, config=google, **common)  # type: ignore[arg-type]
        if bucket.scheme == "az":
            azure = _azure_options(bucket, endpoint)
            return AzureStore(bucket.name, config=azure, **common)  # type: ignore[arg-type]
        return S3Store(bucket.name, config=_s3_options(bucket, endpoint), **common)  # type: ignore[arg-type]
    except (BaseError, ValueError, OSError) as error:
        raise _wrong(
            f"the bucket's client cannot be made ({type(error).__name__})",
            bucket.where,
            "look at the endpoint, the account and the file of credentials",
        ) from None


def _endpoint(bucket: BucketLocation) -> str:
    """The endpoint, "" for the cloud's own. Raises StoreError for one without encryption that is
    not allowed."""
    found = bucket.endpoint
    if not found and bucket.scheme == "s3":
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
        found = next((os.environ[name] for name in names if os.environ.get(name)), "")
        empty = next((name for name in names if name in os.environ), "")
        if empty and not found:  # obstore panics at the first request
            raise _wrong(
                "the endpoint in the environment is empty",
                empty,
                "unset it, or write the endpoint's address into it",
            )
    _check_endpoint(found, bucket.where)  # the environment's, too
    if found.startswith("http://") and not bucket.allow_http:
        raise _wrong(
            "the endpoint is not encrypted",
            bucket.where,
            "use https://, or add allow_http=true where everybody on the way may read",
        )
    return found


def _s3_options(bucket: BucketLocation, endpoint: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "conditional_put": "etag",
        "virtual_hosted_style_request": bucket.virtual_host,
        # Hashing every byte with SHA-256 costs more than sending it. TLS keeps the bytes intact on
        # the way, and every extent has its own checksum. Without TLS, only the signature protects
        # them.
        "unsigned_payload": not endpoint.startswith("http://"),
    }
    if endpoint:
        config["endpoint"] = endpoint
    region = bucket.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    config["region"] = region or "us-east-1"
    path = bucket.credentials
    if not path and not os.environ.get("AWS_ACCESS_KEY_ID"):
        path = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "")
    if path:
        config |= _aws_file(Path(path), bucket.profile)
    elif bucket.profile != "default":
        raise _wrong(
            f"there is no file with the profile {bucket.profile}",
            bucket.where,
            "name it with ?credentials=<path>, or leave out profile",
        )
    return config


def _aws_file(path: Path, profile: str) -> Mapping[str, str]:
    """Access key and secret of a profile in a file as the AWS tools write it."""
    found = configparser.ConfigParser(interpolation=None)
    try:
        found.read_string(_read_credentials(path))
        section = found[profile]
        keys = {
            "access_key_id": section["aws_access_key_id"],
            "secret_access_key": section["aws_secret_access_key"],
        }
    except (configparser.Error, KeyError):
        raise _wrong(
            f"no credentials of the profile {profile} in this file",
            str(path),
            f"write [{profile}], aws_access_key_id = ... and aws_secret_access_key = ...",
        ) from None
    token = section.get("aws_session_token", "")
    return keys | ({"session_token": token} if token else {})


def _google_options(bucket: BucketLocation) -> dict[str, Any]:
    if not bucket.credentials:
        return {}
    _read_credentials(Path(bucket.credentials))  # exists, and no other user may read it
    return {"application_credentials": bucket.credentials}


def _azure_options(bucket: BucketLocation, endpoint: str) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if bucket.account:
        config["account_name"] = bucket.account
    if endpoint:
        config["endpoint"] = endpoint
    if bucket.credentials:
        for line in _read_credentials(Path(bucket.credentials)).splitlines():
            name, _, value = line.partition("=")
            if known := _AZURE_NAMES.get(name.strip()):
                config[known] = value.strip()
            elif line.strip() and not line.startswith("#"):
                raise StoreError(
                    "a line of this file is none of " + ", ".join(_AZURE_NAMES),
                    where=bucket.credentials,
                    remedy="write NAME=value, one a line",
                )
    return config


def _read_credentials(path: Path, *, private: bool = True) -> str:
    """Read a file of credentials. As with the run's secret, no other user may be able to read
    it."""
    try:
        status, text = path.stat(), path.read_text("utf-8")
    except FileNotFoundError:
        raise _wrong("there is no such file", str(path), "name a file of credentials") from None
    except UnicodeDecodeError:
        raise _wrong("this is not a text file", str(path), "name a file of credentials") from None
    except OSError as error:
        raise translate_os_error(error, path) from error
    if private and status.st_mode & 0o077:
        raise _wrong(
            "other users of this machine can read these credentials",
            str(path),
            f"run: chmod 600 {path}",
        )
    return text


# --- probing --------------------------------------------------------------------------------
def probe_store(store: RunStore, where: str) -> None:
    """Check that the store keeps what a run rests on. Exactly one of several creators wins, a
    created object is listed at once, ranges are the bytes requested. Raises UnfitStoreError if not,
    and StoreError when it cannot be reached."""
    prefix = f"{PROBE_PREFIX}{secrets.token_hex(8)}/"
    keys = [f"{prefix}{name}" for name in ("twice", "race", "range")]
    try:
        _probe_create(store, keys[0], where)
        _probe_race(store, keys[1], where)
        _probe_range(store, keys[2], where)
        if store.list(prefix) != sorted(keys):
            raise _unfit("what was just created is not listed", where)
    finally:
        with suppress(StoreError):  # the probe's own verdict counts
            for key in keys:
                store.delete(key)
    if store.list(prefix):
        raise _unfit("what was just deleted is still listed", where)


def _probe_create(store: RunStore, key: str, where: str) -> None:
    store.create(key, b"first")
    with suppress(AlreadyExistsError):
        store.create(key, b"second")
        raise _overwrites_error(where)
    if store.get(key) != b"first":
        raise _overwrites_error(where)


def _probe_race(store: RunStore, key: str, where: str) -> None:
    start = threading.Barrier(PROBE_WRITERS)
    won: list[bytes] = []
    failed: list[Exception] = []

    def race(number: int) -> None:
        content = b"%d" % number
        start.wait()
        try:
            store.create(key, content)
        except AlreadyExistsError:
            return
        except Exception as error:
            failed.append(error)
            return
        won.append(content)

    threads = [threading.Thread(target=race, args=(n,), daemon=True) for n in range(PROBE_WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    if len(won) != 1 or store.get(key) != won[0]:
        raise _overwrites_error(where)


def _probe_range(store: RunStore, key: str, where: str) -> None:
    content = bytes(range(256)) * 4
    store.create(key, content)
    for start, stop in ((0, 16), (250, 262), (1023, 1024)):
        out = bytearray(stop - start)
        with suppress(CorruptError):  # `out` says it
            store.read_into(key, start, memoryview(out))
        if out != content[start:stop] or store.size(key) != len(content):
            raise _unfit("a range that was read is not the bytes asked for", where)


def _overwrites_error(where: str) -> UnfitStoreError:
    return _unfit(
        "the store overwrites what is there instead of refusing (it ignores If-None-Match), so two "
        "trainers could both win",
        where,
    )


def _unfit(problem: str, where: str) -> UnfitStoreError:
    remedy = "use one that does not: docs/guide/stores.md names those that were tested"
    return UnfitStoreError(problem, where=where, remedy=remedy)
