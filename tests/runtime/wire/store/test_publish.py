"""A name is given once, also where a file system cannot link, or answers an old question."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.errors import RunFolderError
from holdfast.wire.store import publish
from holdfast.wire.store.run_store import AlreadyExistsError, FolderStore, translate_os_error


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_hard_links_one_of_two_writers_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_links(old: Path, new: Path) -> None:
        raise OSError(code, os.strerror(code), str(old), None, str(new))

    monkeypatch.setattr(os, "link", no_links)
    store = FolderStore(tmp_path)
    store.create("terms/1.json", b"first")
    (tmp_path / "other").write_bytes(b"second")
    with pytest.raises(FileExistsError):  # a racing writer, after the look for the name
        publish.publish_file(tmp_path / "other", tmp_path / "terms" / "1.json")
    with pytest.raises(AlreadyExistsError):
        store.create("terms/1.json", b"third")
    assert store.get("terms/1.json") == b"first"
    assert sorted(os.listdir(tmp_path / "terms")) == ["1.json"]


def test_where_neither_works_the_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(old: Path, new: Path) -> None:
        raise OSError(errno.EPERM, "no", str(old), None, str(new))

    class NoLibrary:
        def __init__(self, *_: object, **__: object) -> None: ...

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(publish.ctypes, "CDLL", NoLibrary)
    with pytest.raises(RunFolderError, match="neither make hard links nor rename without"):
        FolderStore(tmp_path).create("terms/1.json", b"first")


def test_an_answer_that_was_asked_for_twice_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is made, and the answer says that the name exists (NFS)."""
    make = os.link

    def made_and_denied(old: Path, new: Path) -> None:
        make(old, new)
        raise FileExistsError(errno.EEXIST, "exists", str(old), None, str(new))

    monkeypatch.setattr(os, "link", made_and_denied)
    store = FolderStore(tmp_path)
    store.create("terms/1.json", b"ours")
    assert store.get("terms/1.json") == b"ours"


def test_a_file_system_that_may_only_be_read_is_named() -> None:
    error = translate_os_error(OSError(errno.EROFS, "Read-only file system"), Path("/run"))
    assert "read-only" in str(error)
