"""What a local launch refuses before anything is started. (What it starts:
tests/runtime/elastic.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.config.loading.load import LoadedConfig, load_config
from holdfast.errors import ModelFolderError, RunFolderError
from holdfast.launch import local
from holdfast.launch.run.runs import open_run
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import newest_term


def _loaded(folder: Path, *overrides: str) -> LoadedConfig:
    return load_config(None, [f"folder={folder}", "device=cpu", "layout.workers=1", *overrides])


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    loaded = _loaded(tmp_path / "run", "cluster.interface=192.0.2.7")
    with pytest.raises(RunFolderError, match=r"cluster\.interface: cannot listen on 192\.0\.2\.7"):
        local.train_locally(loaded, dataset_version="toy")
    assert FolderStore(tmp_path / "run").list("terms/") == []


def test_a_metrics_port_that_is_taken_leaves_the_folder_free(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        loaded = _loaded(tmp_path / "run", f"cluster.metrics_port={taken.getsockname()[1]}")
        with pytest.raises(RunFolderError, match=r"cluster\.metrics_port"):
            local.train_locally(loaded, dataset_version="toy")
    assert newest_term(FolderStore(tmp_path / "run"))[1] is None


def test_a_secret_that_others_can_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "secret").write_text("ab" * 32)
    (tmp_path / "run" / "secret").chmod(0o644)
    with pytest.raises(RunFolderError, match="chmod 600"):
        local.train_locally(_loaded(tmp_path / "run"), dataset_version="toy")


def test_an_unplanned_configuration(tmp_path: Path) -> None:
    loaded = load_config(None, [f"folder={tmp_path}/run"])
    with pytest.raises(RunFolderError, match=r"layout\.workers.*not been planned"):
        local.train_locally(loaded, dataset_version="toy")
    assert not (tmp_path / "run").exists()


def test_the_command_that_takes_a_run_up_again(tmp_path: Path) -> None:
    path = tmp_path / "my run.yaml"
    path.write_text("train: {steps: 7}\n")
    command = local.resume_command(load_config(path, ["train.batch_size=32"]))
    assert command == f"holdfast train '{path}' train.batch_size=32"


def test_the_command_that_takes_up_a_script_s_run(tmp_path: Path) -> None:
    own = ['task.args={"script": "my loop.py", "arguments": ["--hidden", 16]}']
    own += ["name=my-loop", "task.name=holdfast.tasks.script:Script", f"task.folder={tmp_path}"]
    command = local.resume_command(_loaded(tmp_path / "run", *own, "train.steps=9"))
    script = f"'{tmp_path}/my loop.py'"
    sets = (
        f"--set folder={tmp_path}/run --set device=cpu --set layout.workers=1 --set train.steps=9"
    )
    assert command == f"holdfast run {script} {sets} -- --hidden 16"


def test_a_run_file_whose_model_folder_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{from: {tmp_path}/moved}}\n")
    with pytest.raises(ModelFolderError, match="name the run folder in the place of the run file"):
        open_run(path)
