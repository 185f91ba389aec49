"""Two steps, and one with a NaN, in forks of a process that has imported what a fork server does,
for `test_fork_server_preloads.py`.

    python -m tests.support.preloaded_steps FOLDER LAYOUT...

Prints as JSON, by layout, which torch modules the fork server has apart from torch itself, and what
a rank imported in addition. The fork servers are forks of this process, which has what they have in
common.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast.elastic.worker.main  # noqa: F401  (as the fork server does)
from holdfast.config.run import RunConfig
from holdfast.elastic.protocol.worker_spec import modules_to_preload
from holdfast.errors import NonFiniteError
from holdfast.parallel.torch_compat import local_tensor
from tests.support import layouts

HEAVY = ("sympy", "torch._dynamo", "torch.distributed.fsdp")


def main(folder: Path, names: list[str]) -> None:
    found = {}
    for name in names:
        here = folder / name
        here.mkdir()
        _succeeds([_forked(lambda: _template(name, here))])  # noqa: B023  (it is waited for)
        found[name] = json.loads((here / "found").read_text())
    print(json.dumps(found))


def _template(name: str, folder: Path) -> None:
    case = layouts.case(name)
    of_one = case.replicas[0]
    degrees = {f"layout__{axis}": getattr(of_one, axis) for axis in ("pp", "dp_shard", "tp")}
    config = layouts.config_of({**case.changes, **degrees})
    for module in modules_to_preload(config):
        importlib.import_module(module)
    before = set(sys.modules)
    children = [
        _forked(lambda rank=rank: _work(case, config, rank, folder, before))  # type: ignore[misc]
        for rank in range(case.world_size)
    ]
    _succeeds(children)
    more = [json.loads((folder / str(rank)).read_text()) for rank in range(case.world_size)]
    found = {"template": [n for n in HEAVY if n in before], "more": more}
    (folder / "found").write_text(json.dumps(found))


def _succeeds(children: list[int]) -> None:
    codes = [os.waitpid(pid, 0)[1] for pid in children]
    if any(codes):
        raise SystemExit("a process failed")


def _forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def _work(case: layouts.Case, config: RunConfig, rank: int, folder: Path, before: set[str]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), case.world_size)
    made = layouts.engine_of(config, layouts.topology_of(case, config), rank, store)
    for step in (1, 2):
        assert layouts.one_step(made, step).is_finite
    with torch.no_grad():
        local_tensor(next(made.objective.parameters())).fill_(math.nan)
    with suppress(NonFiniteError):
        layouts.one_step(made, 3)
        raise SystemExit("a NaN was not found")
    more = [name for name in set(sys.modules) - before if name.split(".")[0] in ("torch", "sympy")]
    (folder / str(rank)).write_text(json.dumps(sorted(more)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
