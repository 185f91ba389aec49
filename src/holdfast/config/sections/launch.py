"""The section `launch:` of a run file: on whose machines `holdfast launch` starts a run's nodes.

`ssh`: hosts; `slurm`: what is asked of Slurm; `ray`: what each node takes of a Ray cluster;
`kubernetes`: the pods that a cluster starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from holdfast.config.sections.base import Section, check_each, check_text

SSH_WORD = re.compile(
    r"-(?=.)[46AaCfGgKkMNnqsTtVvXxYy]*(?P<valued>[BbcDEeFIiJLlmOoPpQRSWw](?P<value>.+)?)?",
    re.DOTALL,
)
"""A word of ssh's options. One that is valued and has no value takes the next word as such."""
HOST = r"[A-Za-z0-9_:\[][A-Za-z0-9._:@%,\[\]-]*"
"""Characters of hosts; `launch/owners/ssh/hosts.py` reads them. An option of ssh is none."""


class SshConfig(Section):
    hosts: Annotated[
        tuple[str, ...], check_each(HOST, "is no host: use HOST or USER@HOST, such as gpu-1")
    ] = ()
    """hosts of the nodes, each as HOST, USER@HOST, USER@HOST:PORT or gpu[1-4]; each gets one
    node"""
    hosts_file: str = ""
    """path of a file with one host a line, in place of hosts: `HOST slots=N port=N user=NAME`.
    slots is cluster.places of that node. The lines of one host are one node, and their places add
    up"""
    user: str = Field("", pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*)?$")
    """user on hosts that name none; empty: ssh's"""
    python: str = ""
    """Python on the hosts that has Holdfast; empty: the path of the Python that runs this
    command"""
    folder: str = Field(".holdfast", min_length=1)
    """folder on the hosts for logs and secrets of nodes; it starts at the home"""
    options: tuple[str, ...] = Field((), description='further options of ssh, as ["-p", "2222"]')

    def broken_rules(self) -> Iterator[str]:
        if self.hosts and self.hosts_file:
            yield "launch.ssh.hosts and hosts_file both name hosts: leave one of them out"
        words = iter(self.options)
        for word in words:
            found = SSH_WORD.fullmatch(word)
            if found is None:
                yield f"launch.ssh.options: {word!r} is no option of ssh: use [-o, NAME=VALUE]"
            elif found["valued"] and not found["value"] and not next(words, ""):
                yield f"launch.ssh.options: {word!r} has no value: use [{word}, VALUE]"


_COUNT = r"([A-Za-z0-9_.-]+:)?[0-9]+"
SlurmTime = Annotated[
    str,
    check_text(
        r"(?i:unlimited|infinite)|-1|([0-9]+-)?[0-9]+(:[0-9]+){0,2}",
        "is no time of Slurm: use 4:00:00, or 2-00:00:00 for days",
    ),
]
SlurmMemory = Annotated[
    str, check_text("[0-9]+[KkMmGgTt]?", "is no amount of memory of Slurm: use 64G")
]
SlurmDevices = Annotated[
    str, check_text(f"{_COUNT}(,{_COUNT})*", "is no number of devices: use 8 or h100:8")
]


class SlurmConfig(Section):
    """Options of the jobs ([slurm.md](../guide/slurm.md)). A value that is left out is the
    cluster's."""

    partition: str = Field("", description="partition, or several with commas")
    account: str = Field("", description="account that is charged")
    qos: str = Field("", description="quality of service")
    time: SlurmTime = ""
    """time limit, as 4:00:00 or 2-00:00:00; the job is queued again after it"""
    gpus_per_node: SlurmDevices = Field("", description="devices of each node, as 8 or h100:8")
    gres: str = Field("", description="generic resources of each node, as gpu:8")
    cpus: int = Field(
        0, ge=0, description="CPUs of each node, if the job shares it; 0: the cluster's"
    )
    memory: SlurmMemory = Field("", description="memory of each node, as 64G; empty: the cluster's")
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
    options: Annotated[
        tuple[str, ...], check_each("-.*", "is no option of sbatch: write it as --mail-type=END")
    ] = ()
    """further options of sbatch, such as --switches=1 or --mail-type=END"""
    setup: tuple[str, ...] = ()
    """shell lines that a job runs first, such as module load cuda"""

    @property
    def devices_of_node(self) -> int:
        """Return the number of devices in gpus_per_node or gres; 0 if they name none."""
        gres = [each.removeprefix("gres/") for each in self.gres.split(",")]
        asked = [each for each in self.gpus_per_node.split(",") if each]
        asked = asked or [each for each in gres if each.partition(":")[0] == "gpu"]
        counts = [each.rpartition(":")[2] for each in asked]
        return sum(int(each) if each.isdecimal() else 1 for each in counts)


RAY_ADDRESS = re.compile(
    r"(?:ray://)?[A-Za-z0-9][A-Za-z0-9.-]*:\d{1,5}|(?:ray://)?\[[0-9A-Fa-f:.]+\]:\d+"
)
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Ray replaces these hosts with another address of the machine, and then waits without an end."""


class RayConfig(Section):
    address: str = ""
    """Ray's head as HOST:PORT, or ray://HOST:PORT of its client server for a machine outside the
    cluster; empty: RAY_ADDRESS"""
    cpus: float = Field(1, ge=0, description="CPUs that Ray gives each node")
    gpus: float = Field(0, ge=0, description="GPUs that Ray gives each node: as many as places")
    resources: dict[str, float] = Field({})
    """further resources of Ray that each node takes, as NAME: NUMBER"""
    groups: Literal["replica", "run"] = "replica"
    """replica: the nodes of a replica start together, once Ray has them; run: all nodes start
    together, each on a machine of its own"""
    autoscaler: bool = False
    """true: Ray's autoscaler brings machines that are not there yet, so it is no mistake if none
    has room for a node"""
    runtime_env: dict[str, Any] = Field({})
    """Ray's own runtime_env for each node: working_dir, env_vars, pip and so on"""

    @field_validator("address")
    @classmethod
    def _is_address(cls, address: str) -> str:
        if not address:
            return address
        if not RAY_ADDRESS.fullmatch(address):
            raise ValueError(
                f"{address!r} is no address of Ray's head: use HOST:PORT, as ray start --head "
                "prints it"
            )
        if address.removeprefix("ray://").rpartition(":")[0] in LOOPBACK:
            raise ValueError(
                f"Ray cannot be reached at {address}, because it replaces this host by another: "
                "use the address that ray start --head prints"
            )
        return address

    def broken_rules(self) -> Iterator[str]:
        if not any(self.bundle.values()):
            yield "each node has to take something of Ray: set cpus to 1, for example"

    @property
    def bundle(self) -> dict[str, float]:
        """What one node takes, as Ray names it."""
        taken = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: number for name, number in taken.items() if number}


QUANTITY = r"^([0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?)?$"
NAMESPACE = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
QUEUE_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
OBJECT_NAME = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"
TOLERATION = re.compile(
    r"(?P<key>[^=:]+)(=(?P<value>[^:]*))?:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute)"
)

Pairs = Annotated[tuple[str, ...], check_each(r"[^=\s]+=[^=\s]*", "is no pair: use NAME=VALUE")]
JobKind = Literal["job", "jobset", "volcano", "trainer", "kuberay", "yunikorn", "kubedl"]


class KubernetesConfig(Section):
    """One pod for each node. [kubernetes.md](../guide/kubernetes.md) says which kind suits
    which cluster."""

    kind: JobKind = "job"
    """what is submitted: a Job of Kubernetes, JobSet, Job of Volcano, TrainJob, RayCluster, Job for
    YuniKorn, PyTorchJob of KubeDL"""
    context: str = Field("", description="context of kubectl; empty: the current one")
    namespace: str = Field("default", pattern=NAMESPACE)
    """namespace of all objects"""
    image: Annotated[str, check_text(r"\S+", "is no name of an image: use NAME:TAG")] = ""
    """image of the pods, which has Holdfast (docs/guide/deploy.md)"""
    pull_secret: str = Field("", pattern=OBJECT_NAME, description="Secret for pulling the image")
    queue: Annotated[
        str, check_text(QUEUE_NAME, "is no name of a queue: use letters, digits, - and .")
    ] = ""
    """queue of Kueue (a LocalQueue), or of Volcano or YuniKorn; empty: none"""
    priority_class: str = Field("", pattern=OBJECT_NAME)
    """a WorkloadPriorityClass if Kueue has the queue; otherwise a PriorityClass"""
    topology: Literal["none", "preferred", "required"] = "none"
    """whether all nodes have to lie in one domain of topology_level"""
    topology_level: str = ""
    """label of nodes that names their domain, as topology.kubernetes.io/zone; for Volcano the
    number of the highest tier of HyperNodes"""
    service_account: str = Field("", pattern=OBJECT_NAME)
    """account of the pods; empty: launch makes one that may read pods"""
    cpu: str = Field("", pattern=QUANTITY, description="CPUs of a pod, as 8 or 500m; empty: open")
    memory: str = Field("", pattern=QUANTITY, description="memory of a pod, as 64Gi; empty: open")
    gpus: int = Field(0, ge=0, description="accelerators of a pod")
    gpu_resource: str = Field("nvidia.com/gpu", description="what the cluster calls them")
    resources: Annotated[
        tuple[str, ...],
        check_each(
            rf"[^=\s]+=(?=.){QUANTITY.strip('^$')}", "is no amount of a resource: use NAME=QUANTITY"
        ),
    ] = ()
    """further resources of a pod, each as NAME=QUANTITY, as rdma/hca=1"""
    shared_memory: str = Field("", pattern=QUANTITY)
    """size of /dev/shm, which holds snapshots; it counts as memory of the pod. Empty: half of
    launch.kubernetes.memory"""
    node_selector: Pairs = ()
    """labels that a pod's node has to have, each as LABEL=VALUE"""
    tolerations: Annotated[
        tuple[str, ...],
        check_each(TOLERATION, "is no taint: use KEY:NoSchedule or KEY=VALUE:NoExecute"),
    ] = ()
    """taints that pods tolerate, each as KEY[=VALUE]:EFFECT"""
    claim: str = Field("", pattern=OBJECT_NAME)
    """PersistentVolumeClaim with the run folder; this machine mounts it, too"""
    claim_at: str = Field("", pattern=r"^(/.*)?$")
    """path of the claim, in pods as on this machine; empty: the folder that the run folder lies
    in"""
    secret: str = Field("", pattern=OBJECT_NAME)
    """Secret whose key `secret` is the run's secret; empty: launch makes one"""
    environment_from: tuple[str, ...] = ()
    """Secrets whose keys become variables, as credentials of a bucket"""
    user: int = Field(1000, ge=1, description="number of the user and group of the processes")

    def broken_rules(self) -> Iterator[str]:
        by_keys = {"cpu": self.cpu, "memory": self.memory, self.gpu_resource: self.gpus}
        taken = {name: f"{name}={value}" for name, value in by_keys.items() if value}
        yield from _given_twice("resources", self.resources, taken)
        yield from _given_twice("node_selector", self.node_selector, {})
        if self.kind != "yunikorn" and not re.fullmatch(OBJECT_NAME, self.queue):
            yield (
                f"launch.kubernetes.queue {self.queue!r} is no name of an object: use small "
                "letters, digits and -"
            )
        if self.topology != "none" and not self.topology_level:
            yield (
                f"launch.kubernetes.topology {self.topology} needs a level: use "
                "topology_level: topology.kubernetes.io/zone, or topology: none"
            )
        if self.kind == "volcano" and self.topology != "none" and not self.topology_level.isdigit():
            yield (
                "Volcano counts tiers of HyperNodes: use a number as "
                "launch.kubernetes.topology_level, as 1"
            )


def _given_twice(key: str, pairs: Iterable[str], taken: Mapping[str, str]) -> Iterator[str]:
    """Yield the sentence of each pair whose name is there before. taken: name -> what sets it."""
    found = dict(taken)
    for pair in pairs:
        name = pair.partition("=")[0]
        if name in found:
            yield f"launch.kubernetes.{key}: {pair} and {found[name]} are both given: use one"
        found[name] = pair


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
