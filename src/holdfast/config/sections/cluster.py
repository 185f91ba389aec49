"""The section `cluster:` of a run file: how agents and workers find and watch each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from holdfast.config.sections.base import Section
from holdfast.config.sections.peers import WILDCARD_HOSTS
from holdfast.config.sections.sites import SiteConfig

AUTO = "auto"
"""Value of an address that the machine fills in at the start (`launch/node/addresses.py`)."""
LOOPBACK_DEVICE = "lo"
MAX_NAME_LENGTH = 63
"""Characters of a node's name, which becomes a part of file names."""


class ClusterConfig(Section):
    interface: str = AUTO
    """address that this node's agent listens on and tells other nodes. auto: 127.0.0.1 for a run of
    one node, otherwise the address on the route to the other nodes (docs/guide/nodes.md)"""
    gloo_interface: str = AUTO
    """network device that gloo uses; auto: the device of cluster.interface"""
    tls: bool | Literal["auto"] = "auto"
    """encrypt control and copies of snapshots between processes of the run, alike on all nodes;
    auto: unless only this machine reaches the addresses (docs/guide/security.md)"""
    metrics_port: int = Field(0, ge=0, le=65535)
    """port of /healthz and /metrics; 0: any free port"""
    heartbeat_seconds: float = Field(0.2, gt=0, description="seconds between an agent's rounds")
    progress_seconds: float = Field(300, gt=0)
    """a worker without progress for this long counts as hung"""
    compare: bool = True
    """find a worker that hangs while the other workers wait for it, within three steps and a
    second; false: only progress_seconds counts (for a debugger)"""
    check_every_steps: int = Field(0, ge=0)
    """steps between two comparisons of state that several workers hold; a worker that differs from
    the majority takes the majority's copy; 0: never"""
    like_processors: Literal["warn", "require", "ignore"] = "warn"
    """a node joins whose vector units, presets or reference computation differ: warn about it,
    require that none does, or ignore it"""
    loss_jumps: Literal["ignore", "roll_back"] = "ignore"
    """roll_back: a step whose loss jumps is repeated; data that causes the jump on several devices
    is skipped (docs/internals/elastic.md)"""
    grace_seconds: float = Field(0, ge=0)
    """seconds between SIGTERM and SIGKILL on this platform; 0: unknown, so the final save gets no
    deadline"""
    notices: Literal[
        "none", "auto", "aws", "google", "azure", "kubernetes", "slurm", "ray", "file"
    ] = "none"
    """source of notices that this machine will be taken away (docs/guide/notices.md); auto: the
    source that is detected"""
    notices_at: str = ""
    """address of the metadata service, API server or Ray head (HOST:PORT), or the file's path;
    empty: the usual address"""
    notices_every_seconds: float = Field(1.0, gt=0)
    """least seconds between two requests for notices"""
    notices_account: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    """Kubernetes: the folder with token, ca.crt and namespace"""
    notices_taints: str = ""
    """Kubernetes: further taints that end a node, as KEY or KEY=SECONDS, separated by commas; a KEY
    may end with *"""
    prediction: str = ""
    """path of what `holdfast predict fit` wrote; empty: no prediction. While a node is likely to be
    lost, its workers move to free places of other nodes. If there are none, its part of each
    snapshot goes to peers"""
    signals: tuple[Literal["memory_errors", "temperature", "power"], ...] = ()
    """what each node reads of itself to act before a loss: a new uncorrected memory error, a
    device that is too hot, a power brake"""
    left_exit_code: int = Field(0, ge=0, le=255)
    """exit code of a node that is asked to leave before the last step. Some owners of machines
    replace a node only if its code is not 0"""
    max_restarts_without_progress: int = Field(3, ge=0)
    """generations in a row that may end without a new step; with more the run fails"""
    threads_per_worker: int = Field(0, ge=0, description="CPU threads; 0: cores / workers")
    recovery: Literal["live", "restart"] = "live"
    """live: surviving processes continue with their state; restart: all processes end, and new ones
    begin from the newest snapshot or checkpoint"""
    standbys: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """idle processes that replace a lost worker at once; each costs memory; auto: 1 with several
    workers or on a device"""
    node: str = Field("", pattern=r"^([A-Za-z0-9_][A-Za-z0-9._-]*)?$")
    """this node's name, unique in the run; empty: the machine's name"""
    places: int = Field(0, ge=0)
    """workers that fit on this node; 0: all workers of the run"""
    workers_per_device: int = Field(1, ge=1, le=64)
    """workers that share one device and its memory, alike on all nodes; more than 1: they exchange
    data over gloo, through locked host memory (docs/guide/accelerators.md)"""
    backend: Literal["auto", "nccl", "xccl", "gloo"] = "auto"
    """library of exchanges between workers, alike on all nodes. auto: the device's own, or gloo
    with several workers on a device. gloo: through the host's memory. nccl is RCCL on AMD"""
    min_nodes: int = Field(1, ge=1, description="with fewer nodes training stops")
    below_minimum: Literal["wait", "leave"] = "wait"
    """what to do with fewer than min_nodes: wait for more nodes, or save and leave (exit code 3)"""
    below_minimum_seconds: float = Field(600.0, ge=0)
    """how long too few nodes wait before they leave"""
    gather_seconds: float = Field(5.0, ge=0)
    """how long the first generation waits for more nodes than min_nodes"""
    settle_seconds: float = Field(2.0, ge=0)
    """how long a new node must have been reachable before it is admitted"""
    beat_seconds: float = Field(2.0, gt=0)
    """seconds between a node's heartbeats; it is lost after three"""
    alone_seconds: float = Field(20.0, gt=0)
    """how long a minority of the nodes waits before it continues alone"""
    sites: tuple[SiteConfig, ...] = ()
    """places that slow links join, alike on all nodes ([outer-rounds.md](../guide/outer-rounds.md))
    """
    faults: str = ""
    """folder of faults that workers inject into themselves (holdfast chaos); empty: none"""

    def broken_rules(self) -> Iterator[str]:
        """Those of sites, and of several workers on a device."""
        names = [site.name for site in self.sites]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"two sites have the name {twice[0]}: use a name of its own for each"
        patterns = [pattern for site in self.sites for pattern in site.nodes]
        if twice := sorted({each for each in patterns if patterns.count(each) > 1}):
            yield f"two sites have the nodes {twice[0]}: leave them out of one"
        if self.workers_per_device > 1 and self.backend not in ("auto", "gloo"):
            yield (
                f"backend {self.backend} refuses two ranks on one device, and workers_per_device "
                f"is {self.workers_per_device}: use backend: gloo, or workers_per_device: 1"
            )

    def site_of(self, node: str) -> SiteConfig | None:
        """Return the first site that has a node of this name."""
        return next((site for site in self.sites if site.has(node)), None)

    @property
    def replaces_all_workers(self) -> bool:
        """Whether the policy `recovery: restart` holds, which is all that these lines say.

        A node kills all its workers when their generation ends, so none of them holds any state.
        The planner therefore fills every place with a new process, and chooses a restore point.
        Hence a standby would be of no use, and a step that is not finite cannot be done again: it
        ends the run.
        """
        return self.recovery == "restart"

    @property
    def host(self) -> str:
        """The address to listen on; loopback if no address was planned for this node."""
        return "127.0.0.1" if self.interface == AUTO else self.interface

    @property
    def gloo_device(self) -> str:
        """The network device of gloo; loopback if no address was planned for this node."""
        return LOOPBACK_DEVICE if self.gloo_interface == AUTO else self.gloo_interface

    @field_validator("interface")
    @classmethod
    def _is_one_address(cls, host: str) -> str:
        if host in WILDCARD_HOSTS:
            raise ValueError(
                f"{host} is every address of this machine, and other nodes cannot connect to it: "
                "use auto, or one address of this machine"
            )
        return host

    @field_validator("node")
    @classmethod
    def _fits(cls, name: str) -> str:
        if len(name) > MAX_NAME_LENGTH:
            raise ValueError(
                f"a name of {len(name)} characters is too long, {MAX_NAME_LENGTH} are allowed: "
                "use a shorter one, such as node-1"
            )
        return name
