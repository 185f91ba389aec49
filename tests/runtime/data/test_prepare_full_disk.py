"""A disk that really fills up: a size-limited tmpfs in a user and mount namespace of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.corpus import data_config, make, text_folder, text_source
from tests.support.small_disk import has_namespaces, run_on_small_disk

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
(disk / "set").mkdir()
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


@pytest.mark.skipif(not has_namespaces(), reason="no user and mount namespaces here")
@pytest.mark.parametrize(("size", "stage"), [("500k", "tokens"), ("1400k", "shards")])
def test_full_disk_then_room(tmp_path: Path, size: str, stage: str) -> None:
    sources = [
        text_source(text_folder(tmp_path / f"in{i}", files=10, words=4000, seed=i), f"t{i}")
        for i in range(4)
    ]
    disk = tmp_path / "disk"
    disk.mkdir()
    config = data_config(disk / "set", *sources, processes=2)
    script = SCRIPT.replace("SIZE", size)
    out = json.loads(
        run_on_small_disk(disk, "64m", "-c", script, config.model_dump_json(), str(disk))
    )
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
