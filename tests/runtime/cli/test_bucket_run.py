"""A run whose run store is a bucket: every command takes its address, and no disk is shared."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.sections.run_place import local_run_folder
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import FolderStore, RunStore
from tests.runtime.cli.conftest import Trained
from tests.support import s3
from tests.support.commands import apart, within
from tests.support.s3 import Fault, Proxy

pytestmark = pytest.mark.usefixtures("s3_credentials")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this node."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def _checksums(store: RunStore) -> list[tuple[str, ...]]:
    newest = Checkpoint.open(store, list_commits(store)[0])
    return [writer.blob.checksums for writer in newest.commit.writers]


def test_a_run_in_a_bucket_trains_and_is_read(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those of the same run in a folder."""
    where = s3.location(s3.server())
    command = ("train", trained.run_file, f"folder={where}")
    done = within(*command)
    assert done.code == 0, done.err
    assert f"a new run in {where.partition('?')[0]}" in done.err
    store = open_store(where)
    assert _checksums(store) == _checksums(FolderStore(trained.folder))
    assert {"resolved.json", "run.yaml", "environment.json"} <= set(store.list(""))
    local = Path(local_run_folder(where))
    assert stat.S_IMODE(local.stat().st_mode) == 0o700
    secret = (local / "secret").read_text().strip()
    assert not [key for key in store.list("") if secret.encode() in store.get(key)]
    assert {path.name for path in local.iterdir()} == {"secret", "store.json", "logs"}

    # Another node, which has nothing but the address
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert json.loads(within("report", where, "--json").out)["last_step"] == 6
    (tmp_path / "texts.jsonl").write_text('{"text": "the quick brown fox"}\n')
    for _ in range(2):
        within("evaluate", where, "--tasks", tmp_path / "texts.jsonl").succeeds()
    assert len(json.loads(within("report", where, "--json").out)["tasks"]) == 1
    assert "finished after step 6" in within("watch", where).out
    assert within("checkpoint", "list", where).out.count("commits/") == 2
    finished = within(*command)
    assert "this run is finished: all 6 steps are done" in finished.err
    within("join", where, "--node", "b").refuses("does not have the run's secret", "copy")
    within("notice", where, "--seconds", "9").refuses("does not have the run's secret")
    within(*command, "--fresh").refuses_last("cannot be renamed", "another prefix")
    other = within(*command, "seed=2")
    other.refuses_last(where.partition("?")[0], "seed was 1 and is now 2")
    within("join", f"{where}&timeout=9", "--node", "a").refuses_last("the run's secret")


@pytest.mark.slow
def test_all_other_commands_take_the_address(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = s3.location(s3.server())
    run_file = tmp_path / "run.yaml"  # without a dataset's folder: it is in the bucket
    run_file.write_text(trained.run_file.read_text().replace(f"folder: {trained.root}/dataset", ""))
    command = ("train", run_file, f"folder={where}")
    done = apart(*command)
    assert done.code == 0, done.err
    longer = apart(*command, "train.steps=8", "train.schedule.steps=6")
    assert longer.code == 0, longer.err
    assert "from the state after step 6" in longer.out, longer.out
    looked = apart("doctor", where)
    assert looked.code == 0, looked.out + looked.err
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    copy = tmp_path / "copy"
    for line in (
        ("checkpoint", "diff", f"{where}@6", trained.folder),
        ("checkpoint", "verify", where),
        ("checkpoint", "show", where, "3"),
        ("checkpoint", "copy", where, "--to", copy),
        ("checkpoint", "verify", copy),
        ("export", where, "--to", tmp_path / "exported"),
        ("generate", where, "the quick", "--tokens", "4"),
        ("data", "audit", where),
        ("report", where, "--output", tmp_path / "page.html"),
        ("track", where, "--to", "csv"),
        ("branch", where, "--at", "6", "--to", tmp_path / "branch", "train.steps=9"),
        ("train", tmp_path / "branch" / "run.yaml"),
        ("data", "audit", tmp_path / "branch"),
        ("layout", "show", run_file, f"folder={where}", "--workers", "2"),
    ):
        done = apart(*line)
        assert done.code == 0, (line, done.out, done.err)
    audited = apart("data", "audit", tmp_path / "branch")
    assert "6 steps" in audited.out


def test_what_a_bucket_may_be_like(trained: Trained, proxy: Proxy) -> None:
    def train(where: str) -> tuple[str, ...]:
        return "train", str(trained.run_file), f"folder={where}"

    quick = {"timeout": 1, "retries": 0}
    where = s3.location(proxy.address, **quick)
    proxy.drop_headers = frozenset({"if-none-match"})
    within(*train(where)).refuses_last("overwrites what is there", "If-None-Match")
    proxy.drop_headers = frozenset()
    for status, code, said, remedy in (
        (404, "NoSuchBucket", "there is no such bucket", "create it"),
        (403, "InvalidAccessKeyId", "refuses these credentials", "AWS_ACCESS_KEY_ID"),
        (301, "PermanentRedirect", "the bucket is in another region", "?region="),
        (400, "AuthorizationHeaderMalformed", "the bucket is in another region", "?region="),
    ):
        proxy.rule = lambda request, status=status, code=code: Fault(status, code)
        within(*train(where)).refuses_last(said, remedy)
    proxy.rule = lambda request: None
    within("join", where, "--node", "a").refuses("no run has been started here")
    within("report", where).refuses("there is no run here")
    within("report", "s3://b/p?password=x").refuses("must hold no secret")
    within(*train("file:///x")).refuses("file:// is no kind of run store")
    imported = within("checkpoint", "import", trained.run_file, "--from", "x", f"folder={where}")
    imported.refuses("an import needs a run folder", "folder=")
