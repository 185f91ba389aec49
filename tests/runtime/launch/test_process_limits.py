"""Limits that no run could start under are refused before anything starts."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from holdfast.config.loading.load import resolve_config
from holdfast.config.run import RunConfig
from holdfast.errors import UserError
from holdfast.launch.node.process_limits import MIB, memory_need, refuse_low_limits

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
