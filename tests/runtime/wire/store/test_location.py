"""Locations: what they open, and what is refused before anything is asked."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from holdfast.errors import StoreError
from holdfast.wire.store.location import (
    ADDRESS_OPTIONS,
    BucketLocation,
    open_store,
    parse_location,
    probe_store,
)
from holdfast.wire.store.run_store import FolderStore
from tests.support.borders import unknown_entries
from tests.support.memory_store import MemoryStore


def test_folders(tmp_path: Path) -> None:
    for location in (tmp_path / "run", str(tmp_path / "run"), f"file://{tmp_path}/run"):
        store = open_store(location)
        assert isinstance(store, FolderStore)
        assert store.folder == tmp_path / "run"
    assert open_store("file:///a%20b").folder == Path("/a b")  # type: ignore[attr-defined]


def test_a_bucket_and_its_options() -> None:
    found = parse_location(
        "s3://runs/team/mine/?endpoint=https://host:9000&region=eu-1&virtual_host=true"
        "&credentials=/etc/keys&profile=p&ca=/etc/ca.pem&timeout=2.5&retries=0"
    )
    assert found == BucketLocation(
        "s3",
        "runs",
        "team/mine",
        endpoint="https://host:9000",
        region="eu-1",
        virtual_host=True,
        credentials="/etc/keys",
        profile="p",
        ca="/etc/ca.pem",
        timeout=2.5,
        retries=0,
    )
    assert found.where == "s3://runs/team/mine"
    assert parse_location("az://box?account=a").where == "az://box"


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("ftp://host/x", "ftp:// is no kind of run store"),
        ("s3:///x", "the bucket's name is missing; write s3://bucket/prefix"),
        ("file://host/x", "a file's address has no host"),
        ("s3://b/x?colour=red", "the option 'colour' that Holdfast does not know"),
        ("s3://b/x?timeout=soon", "timeout is not a number of seconds"),
        ("s3://b/x?retries=-1", "retries is not a number"),
        ("s3://b/x?compress=gzip", "compress knows zstd only"),
        ("file:///x?region=eu", "the option 'region'"),
        ("s3://b/x?allow_http=yes", "allow_http is not true or false"),
        ("s3://b/x?endpoint=http://h", "the endpoint is not encrypted"),
        ("s3://b/x?endpoint=h:9000", "the endpoint is no address"),
        ("gs://b/x?endpoint=https://h", "the option 'endpoint'"),
        ("s3://b/x?credentials=/not/there", "/not/there: there is no such file"),
        ("s3://b/my#run", "b/my: what follows # would be left out; write a # of a name as %23"),
        ("file:///a#b", "what follows #"),
        ("s3://b/x?region=a&region=b", "named twice"),
        ("s3://b/x?region=a?endpoint=https://h", "b/x: the address has a second ?; join options"),
        ("s3://b/x&region=eu", "s3://b/x: the option region is in the path; begin the options"),
        ("file:///x&seal=env", "the option seal is in the path"),
        ("s3://b/x?region=us east", "region is no name of a region; use region="),
        ("s3://b/x?region=us%3Feast", "region is no name of a region"),
        ("s3://b/x?regoin=a", "did you mean region?"),
        ("s3://b/x?profile=p", "no file with the profile p"),
        ("gs://b/x?virtual_host=true", "the option 'virtual_host'"),
        ("s3://host:9000/b/x", "'host:9000' is no name of a bucket; write a server as ?endpoint"),
        ("s3://[::1]/b", "'[::1]' is no name of a bucket"),
        ("s3://[b/x", "this is no address"),
        ("s3://b/100%", "a % of a name as %25"),
        ("s3://b/%ff", "this is no address"),
        ("s3://b/x%0ay", "control character"),
        ("s3://b/x ", "a space around it"),
        ("s3://b/a/../x", "has //, . or .. in it"),
        ("s3://b//x", "has //, . or .. in it"),
        ("s3://b/x?endpoint=https://h:99999", "the endpoint is no address"),
        ("s3://b/x?endpoint=https://[::1", "the endpoint is no address"),
        ("s3://b/x?endpoint=HTTP://h", "the endpoint is no address"),
        ("s3://b/x?endpoint=https:///p", "the endpoint is no address"),
        ("s3://AKIA:hunter2@b/x", "a location must hold no secret"),
        ("s3://b/x?secret_access_key=hunter2", "a location must hold no secret"),
        ("s3://b/x?session_token=hunter2", "a location must hold no secret"),
        ("s3://b/x?endpoint=https://me:hunter2@h", "the endpoint holds more than an address"),
        ("s3://b/x?endpoint=https://h/%3Fsig=hunter2", "the endpoint holds more than an address"),
        ("s3://b/x?endpoint=https://h/%23hunter2", "the endpoint holds more than an address"),
    ],
)
def test_what_cannot_be_right_is_one_sentence_without_secrets(location: str, said: str) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(location)
    text = str(caught.value)
    assert said in text
    assert "hunter2" not in text
    assert "\n" not in text


@pytest.mark.parametrize("scheme", ADDRESS_OPTIONS)
def test_an_option_that_no_scheme_knows_is_refused_with_its_name(scheme: str) -> None:
    place = "file:///x" if scheme == "file" else f"{scheme}://b/x"
    for name, value in unknown_entries(ADDRESS_OPTIONS[scheme]).items():
        with pytest.raises(StoreError, match=f"{name}|must hold no secret") as caught:
            parse_location(f"{place}?{name}={value}")
        assert "the options of" in str(caught.value) or "no secret" in str(caught.value)


def test_what_an_address_says_reaches_the_client_as_it_is() -> None:
    found = parse_location(
        "s3://b/my%20run%23%2B/x/?endpoint=https://[::1]:9000/p&credentials=/a+b"
    )
    assert (found.prefix, found.endpoint) == ("my run#+/x", "https://[::1]:9000/p")
    assert found.credentials == "/a+b"
    assert parse_location("s3://b/x%26region=eu&y").prefix == "x&region=eu&y"
    assert parse_location("S3://b/run") == parse_location("s3://b/run/?region=")


def test_an_unencrypted_endpoint_of_the_environment_is_refused_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(StoreError, match="add allow_http=true"):
        open_store("s3://b/x")


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreError, match=r"pip install 'holdfast\[bucket\]'"):
        open_store("s3://b/x")


def test_google_and_azure_are_opened_without_asking_anybody(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("AZURE_STORAGE_ACCOUNT_KEY=aGVsbG8=\n")
    keys.chmod(0o600)
    assert open_store(f"az://box/x?account=a&credentials={keys}").where == "az://box/x"  # type: ignore[attr-defined]
    assert open_store("gs://box/x").where == "gs://box/x"  # type: ignore[attr-defined]
    keys.write_text("hunter2\n")
    with pytest.raises(StoreError, match="none of AZURE_STORAGE_ACCOUNT_NAME") as caught:
        open_store(f"az://box/x?account=a&credentials={keys}")
    assert "hunter2" not in str(caught.value)


def test_folders_and_memory_pass_the_probe(tmp_path: Path) -> None:
    for store in (FolderStore(tmp_path), MemoryStore()):
        probe_store(store, "here")
        assert store.list("") == []


class _Overwrites(MemoryStore):
    def create(self, key, data):  # type: ignore[no-untyped-def]
        self.delete(key)
        super().create(key, data)


class _Late(MemoryStore):
    def list(self, prefix: str) -> list[str]:
        return super().list(prefix)[:-1]


class _OffByOne(MemoryStore):
    def read_into(self, key: str, start: int, out: memoryview) -> None:
        super().read_into(key, max(0, start - 1), out)


@pytest.mark.parametrize(
    ("store", "said"),
    [
        (_Overwrites(), "overwrites what is there"),
        (_Late(), "just created is not listed"),
        (_OffByOne(), "not the bytes asked for"),
    ],
)
def test_a_store_that_breaks_a_promise_is_refused(store: MemoryStore, said: str) -> None:
    with pytest.raises(StoreError, match=f"^here: .*{said}"):
        probe_store(store, "here")
