"""A disk that really fills up: a size-limited tmpfs in a user and mount namespace of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.corpus import data_config, make, text_folder, text_source

SCRIPT = """
import json, os, subprocess, sys
from pathlib import Path
from holdfast.config.sections.data import DataConfig
from holdfast.data.stream.dataset import exists
from holdfast.data.prepare.prepare import prepare_dataset as prepare
from holdfast.data.stream.verify import find_problems
from holdfast.errors import UserError

config = DataConfig.model_validate_json(sys.argv[1])
disk, out = Path(sys.argv[2]), {"failed": []}
def attempt():
    said = []
    try:
        out["version"] = prepare(config, say=said.append).version
    except UserError as error:
        out["failed"].append([type(error).__name__, str(error)])
    return said
def remount(options):
    subprocess.run(["mount", "-o", "remount," + options, str(disk)], check=True)

remount("ro")
attempt()
remount("rw,size=SIZE")
attempt()
out["kept"] = len(list((disk / "set" / ".prepare" / "tokens").glob("0*")))
out["exists"] = exists(config.folder)
attempt()  # still full: the same sentence again
remount("size=64m")
out["said"] = attempt()
out["problems"] = find_problems(config.folder)
print(json.dumps(out))
"""


def namespaces_work() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not namespaces_work(), reason="user and mount namespaces are not allowed here")
@pytest.mark.parametrize(("size", "stage"), [("500k", "tokens"), ("1400k", "shards")])
def test_full_disk_then_room(tmp_path: Path, size: str, stage: str) -> None:
    sources = [
        text_source(text_folder(tmp_path / f"in{i}", files=10, words=4000, seed=i), f"t{i}")
        for i in range(4)
    ]
    disk = tmp_path / "disk"
    disk.mkdir()
    config = data_config(disk / "set", *sources, processes=2)
    (tmp_path / "script.py").write_text(SCRIPT.replace("SIZE", size))
    inside = 'mount -t tmpfs -o size=64m none "$1" && mkdir "$1/set" && exec "$2" "$3" "$4" "$1"'
    done = subprocess.run(
        [
            "unshare",
            "-Urm",
            "sh",
            "-c",
            inside,
            "sh",
            str(disk),
            sys.executable,
            str(tmp_path / "script.py"),
            config.model_dump_json(),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    kinds = [kind for kind, _ in out["failed"]]
    assert kinds == ["DataError", "OutOfSpaceError", "OutOfSpaceError"]
    assert "Read-only file system" in out["failed"][0][1]
    for _, sentence in out["failed"][1:]:
        assert "the disk is full" in sentence
        assert "make room" in sentence
        assert str(disk / "set") in sentence
    assert out["exists"] is False
    assert 0 < out["kept"] <= 4
    assert (out["kept"] == 4) == (stage == "shards")
    if stage == "tokens":
        assert any("were done before" in line for line in out["said"])
    assert out["problems"] == []
    assert out["version"] == make(data_config(tmp_path / "elsewhere", *sources)).version
