"""The section `launch.slurm`: what `holdfast launch` asks of Slurm."""

from __future__ import annotations

from pydantic import Field, field_validator

from holdfast.config.sections.base import Section


class SlurmConfig(Section):
    """Options of the jobs ([slurm.md](../guide/slurm.md)). A value that is left out is the
    cluster's."""

    partition: str = Field("", description="partition, or several with commas")
    account: str = Field("", description="account that is charged")
    qos: str = Field("", description="quality of service")
    time: str = ""
    """time limit, as 4:00:00 or 2-00:00:00; the job is queued again after it"""
    gpus_per_node: str = Field("", description="devices of each node, as 8 or h100:8")
    gres: str = Field("", description="generic resources of each node, as gpu:8")
    constraint: str = Field("", description="features that each node must have")
    reservation: str = Field("", description="reservation to run in")
    exclusive: bool = Field(True, description="no other job runs on the nodes")
    nodes_per_job: int = Field(1, ge=0)
    """nodes of one job of the array; 0: all launch.nodes are one job. With 1 Slurm restarts a lost
    node alone"""
    notice_seconds: int = Field(60, ge=0, le=65535)
    """how long before the time limit agents save and leave; 0: not"""
    requeue: bool = True
    """the job is queued again after its time limit or the loss of its node"""
    replace: bool = True
    """for each node that a job loses, a job of one node is queued"""
    options: tuple[str, ...] = ()
    """further options of sbatch, such as --switches=1 or --mail-type=END"""
    setup: tuple[str, ...] = ()
    """shell lines that a job runs first, such as module load cuda"""

    @field_validator("options")
    @classmethod
    def _are_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for option in value:
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"{option!r} is no option of sbatch: write it as --mail-type=END")
        return value

    @property
    def devices_of_node(self) -> int:
        """Return the number of devices in gpus_per_node or gres; 0 if they name none."""
        gres = [each.removeprefix("gres/") for each in self.gres.split(",")]
        asked = [each for each in self.gpus_per_node.split(",") if each]
        asked = asked or [each for each in gres if each.partition(":")[0] == "gpu"]
        counts = [each.rpartition(":")[2] for each in asked]
        return sum(int(each) if each.isdecimal() else 1 for each in counts)
