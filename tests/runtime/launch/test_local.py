"""What a local launch refuses before anything is started. (What it starts:
tests/runtime/elastic.)"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.config.loading.load import LoadedConfig, load_config, resolve_config
from holdfast.config.run import RunConfig
from holdfast.errors import ModelFolderError, RunFolderError, UserError
from holdfast.launch import local
from holdfast.launch.node.process_limits import MIB, memory_need, refuse_low_limits
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


# --- limits that no run could start under are refused before anything starts ----------------------
RUN = "folder: r\ndevice: cpu\ndata: {folder: d}\nlayout: {workers: 2}\n"
SIZES = "preset: null, vocab_size: {}, layers: {}, dim: {}, heads: 4, kv_heads: 2, ffn_dim: {}"
MODEL = "model: {" + SIZES.format(300, 2, 32, 64) + "}\n"
PLENTY = 1 << 50


def _config(text: str = RUN + MODEL) -> RunConfig:
    return resolve_config(text, "run.yaml", []).config


def test_a_node_that_can_train_is_let_through() -> None:
    refuse_low_limits(_config(), 2, 1024, PLENTY)


def test_too_few_descriptors_are_refused_with_the_number_needed() -> None:
    with pytest.raises(
        UserError, match=r"100 open files.*2 workers.*needs 160.*ulimit -Hn"
    ) as found:
        refuse_low_limits(_config(), 2, 100, PLENTY)
    assert found.value.exit_code == 2


def test_a_container_that_is_too_small_is_refused_with_the_sum() -> None:
    sum_ = r"220 MiB for torch \+ 2 x \(30 MiB and 1 MiB of training state\) = 28\d MiB"
    with pytest.raises(UserError, match=rf"200 MiB, and its workers need {sum_}") as found:
        refuse_low_limits(_config(), 2, 1024, 200 * MIB)
    assert found.value.exit_code == 2


def test_the_state_counts_where_it_lies() -> None:
    large = RUN + "model: {" + SIZES.format(32000, 12, 768, 2048) + "}\n"
    need = memory_need(_config(large), 2)
    assert need.state > 1000 * MIB
    on_gpu = _config(large.replace("device: cpu", "device: cuda"))
    assert memory_need(on_gpu, 2).state == 0


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_process_that_may_not_have_the_memory_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = resource.getrlimit

    def limit(number: int) -> tuple[int, int]:
        low = number == getattr(resource, name)
        return (25 * MIB, 25 * MIB) if low else given(number)

    monkeypatch.setattr(resource, "getrlimit", limit)
    with pytest.raises(UserError, match=rf"25 MiB of .*{name}.*640 MiB for torch \+ 1 MiB"):
        refuse_low_limits(_config(), 2, 1024, PLENTY)


def test_the_soft_limit_is_raised_first() -> None:
    code = (
        "import resource; from holdfast.launch.node.process_limits import raise_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 600))\n"
        "print(raise_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "600 (600, 600)", done.stderr
