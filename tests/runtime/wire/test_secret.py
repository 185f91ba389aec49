from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from holdfast.errors import RunFolderError
from holdfast.wire.secret import SECRET_FILE_VARIABLE, Secret, open_secret, read_secret


def test_made_once_and_only_for_its_owner(tmp_path: Path) -> None:
    secret = open_secret(tmp_path / "run", {})
    path = tmp_path / "run" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert open_secret(tmp_path / "run", {}) == secret
    assert len(secret.key) == 32
    assert [p.name for p in path.parent.iterdir()] == ["secret"]


def test_makers_at_the_same_time_agree(tmp_path: Path) -> None:
    found: list[Secret] = []
    start = threading.Barrier(6)

    def make() -> None:
        start.wait(120)
        found.append(open_secret(tmp_path, {}))

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 6
    assert len(set(found)) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_readable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    open_secret(tmp_path, {})
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(RunFolderError, match="chmod 600"):
        open_secret(tmp_path, {})


@pytest.mark.parametrize("content", ["", "abc", "not hexadecimal", "ab" * 15, "é"])
def test_what_is_no_secret_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "secret"
    path.write_text(content, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(RunFolderError, match="not a secret"):
        open_secret(tmp_path, {})


def test_the_launcher_names_a_file(tmp_path: Path) -> None:
    path = tmp_path / "given"
    path.write_text("11" * 32 + "\n")
    path.chmod(0o600)
    secret = open_secret(tmp_path / "run", {SECRET_FILE_VARIABLE: str(path)})
    assert secret.key == b"\x11" * 32
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunFolderError, match="missing"):
        open_secret(tmp_path / "run", {SECRET_FILE_VARIABLE: str(tmp_path / "nowhere")})


def test_it_does_not_show_itself() -> None:
    secret = Secret(b"\xab" * 32)
    assert "ab" * 4 not in f"{secret!r} {secret} {[secret]}"


def test_a_secret_that_another_user_wrote_is_refused(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    path = tmp_path / "secret"
    path.write_text("00" * 32)
    path.chmod(0o600)
    os.chown(path, 65534, 65534)
    with pytest.raises(RunFolderError, match="belongs to another user"):
        read_secret(path)


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """A file behind links, as Kubernetes mounts a Secret."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "secret").write_text("11" * 32)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "secret").symlink_to("..data/secret")
    return tmp_path / "secret"


@pytest.fixture
def as_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file seems to be root's."""
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        fields = list(real(fd))
        fields[4] = 0
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", fstat)


@pytest.mark.parametrize("mode", [0o440, 0o640])
@pytest.mark.usefixtures("as_roots")
def test_a_clusters_file_that_a_group_reads_is_taken_with_a_note(mounted: Path, mode: int) -> None:
    mounted.chmod(mode)
    said: list[str] = []
    secret = open_secret("run", {SECRET_FILE_VARIABLE: str(mounted)}, said.append)
    assert secret.key == b"\x11" * 32
    (note,) = said
    assert note.startswith(f"{mounted}: the users of group ")


@pytest.mark.parametrize("mode", [0o444, 0o644, 0o660, 0o460])
@pytest.mark.usefixtures("as_roots")
def test_a_clusters_file_that_all_read_names_the_clusters_setting(mounted: Path, mode: int) -> None:
    mounted.chmod(mode)
    with pytest.raises(RunFolderError, match=r"set defaultMode: 0400 .*fsGroup"):
        open_secret("run", {SECRET_FILE_VARIABLE: str(mounted)})


def test_a_group_that_reads_a_users_own_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "given"
    path.write_text("11" * 32)
    path.chmod(0o640)
    if os.getuid() == 0:
        os.chown(path, 65534, -1)
    with pytest.raises(RunFolderError, match=r"chmod 600|belongs to another user"):
        open_secret("run", {SECRET_FILE_VARIABLE: str(path)})
