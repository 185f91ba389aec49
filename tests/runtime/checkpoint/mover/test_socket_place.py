"""The mover's socket: a long temporary folder, and one that a cleaner empties."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from holdfast.checkpoint.mover import socket_place
from holdfast.checkpoint.mover.socket_place import (
    MAX_PATH_BYTES,
    SOCKET_NAME,
    MoverSocket,
    make_socket_folder,
)
from holdfast.doctor import checks as doctor_checks
from holdfast.errors import RunFolderError
from tests.support.ranks import wait_until


@pytest.fixture
def long_folder(tmp_path: Path) -> Path:
    folder = tmp_path / ("d" * 112)
    folder.mkdir()
    return folder


def test_a_long_temporary_folder_is_no_obstacle(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(long_folder))
    with make_socket_folder() as folder:
        path = str(Path(folder) / SOCKET_NAME)
        assert len(os.fsencode(path)) <= MAX_PATH_BYTES
        MoverSocket(path).remove()
    assert {c.name: c.state for c in doctor_checks.run_checks()}["sockets"] == "good"


def test_without_a_place_the_sentence_names_the_variable(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        socket_place, "socket_places", lambda: (str(long_folder), "/nowhere/at/all")
    )
    with pytest.raises(RunFolderError, match=r"TMPDIR: .*too long.*No such file.*short path"):
        make_socket_folder()
    check = {c.name: c for c in doctor_checks.run_checks()}["sockets"]
    assert (check.state, "TMPDIR" in check.remedy) == ("fails", True)


@pytest.mark.parametrize("cleaned", ["socket", "folder", "everything"])
def test_a_socket_that_a_cleaner_removes_is_made_again(tmp_path: Path, cleaned: str) -> None:
    place = tmp_path / "t"
    place.mkdir()
    folder = Path(tempfile.mkdtemp(dir=place))
    path = folder / SOCKET_NAME
    listener = MoverSocket(str(path))
    leave, told = os.pipe()
    accepted: list[bool] = []
    server = threading.Thread(target=lambda: accepted.append(listener.wait_for_client(leave)))
    if cleaned == "socket":
        path.unlink()
    else:
        shutil.rmtree(folder if cleaned == "folder" else place)
    server.start()
    try:
        wait_until(path.exists, what="the socket to be made again")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            server.join(120)
            assert accepted == [True]
    finally:
        os.write(told, b"\0")
        server.join(120)
        os.close(leave)
        os.close(told)


def test_a_folder_that_another_user_made_there_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = MoverSocket(str(tmp_path / "s" / SOCKET_NAME))
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "s").mkdir()
    (tmp_path / "s").chmod(0o777)
    listener.restore()  # refused, and tried again later
    assert not (tmp_path / "s" / SOCKET_NAME).exists()
    (tmp_path / "s").chmod(0o700)
    listener.restore()
    assert (tmp_path / "s" / SOCKET_NAME).exists()
