"""The table of `holdfast layout show` that says in which place the state of each rank lies."""

from __future__ import annotations

from holdfast.config.run import RunConfig
from holdfast.layout import Topology
from holdfast.plan.memory.placed_memory import placed_by_rank
from holdfast.report.formatting import format_bytes
from holdfast.show.output import print_table


def print_places(config: RunConfig, topology: Topology) -> None:
    """Print nothing if all lies on the device, without a limit."""
    memory = config.train.memory
    if memory.is_default:
        return
    placed = placed_by_rank(config, topology)
    rows = [
        [rank, *map(format_bytes, (each.device, each.host, each.file, each.staging))]
        for rank, each in enumerate(placed)
    ]
    print_table(rows, ["rank", "device", "host", "file", "of it pieces of an update"])
    print(
        f"train.memory: optimizer {memory.optimizer}, gradients {memory.gradients}, "
        f"parameters {memory.parameters}, activations {memory.activations}; all buffers of sums "
        "lie with gradients"
    )
    if memory.limit:
        most = max(each.device for each in placed)
        words = "within" if most <= memory.limit else "MORE THAN"
        print(
            f"state on a device, at most {format_bytes(most)}: {words} "
            f"train.memory.device_gb {memory.device_gb:g}, without activations"
        )
