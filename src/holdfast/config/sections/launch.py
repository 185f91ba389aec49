"""The section `launch:` of a run file: on whose machines `holdfast launch` starts a run's nodes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from holdfast.config.sections.base import Section
from holdfast.config.sections.launch_kubernetes import KubernetesConfig
from holdfast.config.sections.launch_ray import RayConfig
from holdfast.config.sections.launch_slurm import SlurmConfig
from holdfast.config.sections.launch_ssh import SshConfig


class LaunchConfig(Section):
    """Each node runs one agent ([nodes.md](../guide/nodes.md)); `cluster.places` workers fit on
    it."""

    on: Literal["local", "ssh", "slurm", "ray", "kubernetes"] = "local"
    """the owner of the machines; --on of the command sets it, too"""
    nodes: int = Field(1, ge=1, description="nodes that the run is given; --nodes sets it, too")
    most_nodes: int = Field(0, ge=0)
    """nodes that the run may grow to with another --nodes, or by a scheduler; layout.workers is
    planned for so many. 0: launch.nodes"""
    gather_seconds: float = Field(60.0, gt=0)
    """how long the nodes of torchrun, mpirun or srun wait for each other at the start; the run is
    refused if they do not come"""
    spares: int = Field(0, ge=0, description="further nodes that wait to replace a lost one")
    ssh: SshConfig = SshConfig.model_validate({})
    slurm: SlurmConfig = SlurmConfig()
    ray: RayConfig = RayConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()

    @property
    def devices_of_node(self) -> int:
        """Return how many devices the owner is asked for on each node; 0 if it is not asked."""
        asked = {
            "slurm": self.slurm.devices_of_node,
            "ray": int(self.ray.gpus),
            "kubernetes": self.kubernetes.gpus,
        }
        return asked.get(self.on, 0)
