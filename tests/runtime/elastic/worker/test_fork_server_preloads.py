"""What a fork server imports is what its workers need: no more, and none imports it in its steps. A
worker writes into the pipe of its agent, whatever it writes with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.config.sections.task import SCRIPT_TASK
from holdfast.elastic.protocol.worker_spec import modules_to_preload
from tests.support.tiny_training import tiny

SMALL = {"torch.utils._device", "torch.profiler._cupti_monitor"}
"""A hundred lines each, of torch's own, at the first use of something."""
SYMBOLS, COMPILER, FSDP = "sympy", "torch._dynamo", "torch.distributed.fsdp"

LAYOUTS: dict[str, list[str]] = {
    "dp2": [],
    "bf16.dp2": [],
    "fp16.dp2": [SYMBOLS],
    "full.dp2": [SYMBOLS, COMPILER, FSDP],
    "tp2": [],
    "zero1.2": [],
    "pp2": [SYMBOLS],
    "shard2": [SYMBOLS, COMPILER, FSDP],
    "pp2-shard2": [SYMBOLS, COMPILER, FSDP],
}
"""And what of the heavy ones a fork server has for them."""


@pytest.mark.slow
def test_workers_import_nothing_that_their_template_could(tmp_path: Path) -> None:
    names = [f"shallow.{name}" for name in LAYOUTS]
    command = [sys.executable, "-m", "tests.support.preloaded_steps", str(tmp_path), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == names
    for name, heavy in zip(names, LAYOUTS.values(), strict=True):
        assert found[name]["template"] == heavy, name
        more = {module for of_rank in found[name]["more"] for module in of_rank}
        assert more <= SMALL, name


def test_an_own_loop_has_the_compiler_for_its_optimizers_before_a_worker_is_forked() -> None:
    """A class of torch.optim imports it when it is made."""
    config = tiny()
    own = config.model_copy(update={"task": config.task.model_copy(update={"name": SCRIPT_TASK})})
    assert COMPILER in modules_to_preload(own)
    assert COMPILER not in modules_to_preload(config)


def test_a_run_that_recomputes_has_the_compiler_before_a_worker_is_forked() -> None:
    """torch.utils.checkpoint imports it at its first call, in the first step after a kill."""
    config = tiny()
    for words in ("full", "selective", ("none", "full")):
        train = config.train.model_copy(update={"recompute": words})
        assert COMPILER in modules_to_preload(config.model_copy(update={"train": train}))


CODE = """
import os, sys
from holdfast.elastic.worker.fork_server import redirect_output
redirect_output(int(sys.argv[1]))
print("from Python")
print("an error", file=sys.stderr)
os.write(1, b"from a library\\n")
assert sys.stdin.read() == ""
"""


def test_all_that_a_process_says_goes_into_the_pipe() -> None:
    read_fd, write_fd = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(write_fd)],
        capture_output=True,
        text=True,
        pass_fds=[write_fd],
        timeout=120,
    )
    os.close(write_fd)
    with open(read_fd, encoding="utf-8") as pipe:
        said = pipe.read()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert said == "from Python\nan error\nfrom a library\n"
