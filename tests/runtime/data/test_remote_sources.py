"""Sources in a bucket: the same dataset as from a folder, and only what has changed is fetched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import boto3  # comes with moto
import pytest

from holdfast.config.sections.data import DataConfig
from holdfast.data.prepare import remote_sources
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.prepare.remote_sources import fetch_sources
from holdfast.errors import DataError, UserError
from holdfast.wire.store import slow_requests
from holdfast.wire.store.location import open_objects, parse_location
from tests.support import s3
from tests.support.commands import within, write_run_file
from tests.support.corpus import data_config, make, text_folder, tree
from tests.support.s3 import Fault

pytestmark = pytest.mark.usefixtures("s3_credentials")


def put(location: str, name: str, content: bytes) -> None:
    """Write an object as another program does."""
    objects = open_objects(parse_location(location))
    objects.put(name, name, content)  # type: ignore[attr-defined]


def remove(location: str, name: str) -> None:
    open_objects(parse_location(location)).remove(name)  # type: ignore[attr-defined]


def config_of(location: str, root: Path) -> DataConfig:
    source = {"kind": "text", "path": location, "name": "texts"}
    return data_config(root / "dataset", source, cache=str(root / "cache"))


@pytest.fixture(name="texts")
def _texts(tmp_path: Path) -> Path:
    folder = text_folder(tmp_path / "in", files=8, words=60)
    (folder / "deep").mkdir()
    (folder / "001.txt").rename(folder / "deep" / "a name with spaces.txt")
    return folder


@pytest.fixture(name="there")
def _there(texts: Path) -> str:
    location = s3.location(s3.server())
    for path in sorted(path for path in texts.rglob("*") if path.is_file()):
        put(location, path.relative_to(texts).as_posix(), path.read_bytes())
    return location


def test_a_bucket_gives_the_dataset_of_a_folder(texts: Path, there: str, tmp_path: Path) -> None:
    local = make(config_of(str(texts), tmp_path / "local"))
    found = make(config_of(there, tmp_path / "far"))
    assert found.version == local.version
    assert found.source_paths == (there,)


def fetched(call: Callable[[str], object], there: str) -> list[str]:
    """Return the objects that a call reads."""
    with s3.proxied() as proxy:
        prefix = parse_location(there).prefix
        call(s3.location(proxy.address, prefix))
        keys = [unquote(r.key) for r in proxy.log if r.kind == "GET"]
        return sorted(key.removeprefix(f"{prefix}/") for key in keys)


def test_only_what_has_changed_is_fetched_again(texts: Path, there: str, tmp_path: Path) -> None:
    def fetch(location: str) -> Path:
        config = config_of(location, tmp_path)
        (source,) = fetch_sources(config, lambda _: None, lambda *_: None)
        return Path(str(source.place))

    assert len(fetched(fetch, there)) == 8
    assert tree(fetch(there)) == tree(texts)
    assert fetched(fetch, there) == []
    put(there, "003.txt", (texts / "003.txt").read_bytes()[::-1])  # of the same size
    remove(there, "004.txt")
    assert fetched(fetch, there) == ["003.txt"]
    place = fetch(there)
    assert (place / "003.txt").read_bytes() == (texts / "003.txt").read_bytes()[::-1]
    assert not (place / "004.txt").exists()
    (place / "005.txt").write_text("cut")
    assert fetched(fetch, there) == ["005.txt"]
    with (place.parent / remote_sources.LIST).open("a") as file:
        file.write('["006.t')  # a kill cuts a line short
    assert fetched(fetch, there) == []
    shutil.copytree(place, tmp_path / "again")
    assert "003.txt" in tree(tmp_path / "again")


def test_the_address_of_one_object_is_a_source(texts: Path, there: str, tmp_path: Path) -> None:
    address, _, options = there.partition("?")
    config = config_of(f"{address}/003.txt?{options}", tmp_path)
    assert make(config).streams("train")[0].documents == 1


def test_folders_of_a_web_console_are_no_objects(texts: Path, there: str, tmp_path: Path) -> None:
    """They are empty objects, whose names end in a slash."""
    address, _, options = there.partition("?")
    outer = f"{address.rpartition('/')[0]}/x?{options}"
    host, port = s3.server()
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
    prefix = parse_location(outer).prefix
    for name in ("", "deep/", "nothing/"):
        client.put_object(Bucket=s3.BUCKET, Key=f"{prefix}/{name}", Body=b"")
    put(outer, "deep/a.txt", (texts / "003.txt").read_bytes())
    (source,) = fetch_sources(config_of(outer, tmp_path), lambda _: None, lambda *_: None)
    assert list(tree(Path(str(source.place)))) == ["deep/a.txt"]


def test_other_options_of_an_address_are_the_same_source(there: str, tmp_path: Path) -> None:
    made = make(config_of(there, tmp_path))
    assert make(config_of(f"{there}&timeout=9", tmp_path)).version == made.version


def test_a_dataset_of_the_same_text_in_another_place_is_used(
    texts: Path, there: str, tmp_path: Path
) -> None:
    made = make(config_of(str(texts), tmp_path))
    assert make(config_of(there, tmp_path)).version == made.version
    put(there, "000.txt", b"other text")
    with pytest.raises(DataError, match="holds other text"):
        make(config_of(there, tmp_path))


@pytest.mark.parametrize("key", ["sources", "folder"])
def test_a_bucket_that_keeps_silent_is_named(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(slow_requests, "SAY_AFTER_S", 0.1)
    with s3.proxied() as proxy:
        location = s3.location(proxy.address, retries=0, timeout=2)
        where = location.partition("?")[0]
        proxy.rule = lambda request: Fault(hold=True)
        config = config_of(location if key == "sources" else str(texts), tmp_path)
        if key == "folder":
            config = config.model_copy(update={"folder": location})
        said: list[str] = []
        with pytest.raises(UserError):
            prepare_dataset(config, say=said.append)
        assert [line for line in said if line.startswith(f"{where} has not answered")]
        assert len([line for line in said if "given up after 2 s" in line]) == 1


def test_a_tokenizer_at_an_address_is_refused(tmp_path: Path) -> None:
    path = "data.tokenizer.path=s3://bucket/tokenizer.json?region=x"
    within("data", "prepare", write_run_file(tmp_path), path).refuses_last(
        "data.tokenizer.path", "is an address"
    )


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("{address}/nothing?{options}", "there is no object at"),
        ("{address}?{options}&seal=env", "option of run stores"),
        ("file:///tmp/texts", "starts with file://"),
        ("s3:/bucket/texts", "without its ://"),
    ],
)
def test_an_address_without_a_source_is_refused(
    path: str, said: str, there: str, tmp_path: Path
) -> None:
    address, _, options = there.partition("?")
    location = path.format(address=address, options=options)
    run_file = write_run_file(tmp_path)
    text = run_file.read_text().replace(f"{tmp_path}/texts", location)
    run_file.write_text(text)
    within("data", "prepare", run_file).refuses_last(said)


def test_a_cluster_does_not_read_a_source_that_one_machine_fetches(
    there: str, tmp_path: Path
) -> None:
    run_file = write_run_file(tmp_path)
    run_file.write_text(run_file.read_text().replace(f"{tmp_path}/texts", there))
    within("data", "prepare", run_file, "--on", "ray").refuses_last("this machine alone")


def test_a_bucket_out_of_reach_is_one_sentence(tmp_path: Path) -> None:
    config = config_of(
        "s3://runs/x?endpoint=http://127.0.0.1:9&allow_http=true&retries=0", tmp_path
    )
    with pytest.raises(UserError) as refused:
        make(config)
    assert "\n" not in str(refused.value)
