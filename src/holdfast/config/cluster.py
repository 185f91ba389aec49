"""`cluster:` how agents and workers find and watch each other."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from holdfast.config.base import Section

LONGEST_NAME = 63
"""Of a node: its name becomes a part of names of files."""


class ClusterConfig(Section):
    interface: str = Field("127.0.0.1", description="address that control listens on")
    gloo_interface: str = Field("lo", description="network interface of gloo's traffic")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="of /healthz and /metrics; 0: any free one"
    )
    heartbeat_seconds: float = Field(0.2, gt=0, description="the agent's tick")
    progress_seconds: float = Field(
        300, gt=0, description="a worker without progress for this long is taken for hung"
    )
    compare: bool = Field(
        True,
        description="a worker that stands still while others wait for it is named within three "
        "steps and a second; false: only progress_seconds count (for a debugger)",
    )
    check_every_steps: int = Field(
        0, ge=0,
        description="every so many steps all who hold the same part of the state compare it, and "
        "who differs from the others takes theirs; 0: never",
    )  # fmt: skip
    loss_jumps: Literal["ignore", "roll_back"] = Field(
        "ignore",
        description="roll_back: a step whose loss lies far above those before it is done again, "
        "and data that makes it so on several devices is left out (docs/elastic.md)",
    )
    grace_seconds: float = Field(
        0,
        ge=0,
        description="from SIGTERM to the kill; 0: not known, a save takes as long as it does",
    )
    notices: Literal[
        "none", "auto", "aws", "google", "azure", "kubernetes", "slurm", "ray", "file"
    ] = Field(
        "none",
        description="who is asked whether this machine is about to go (docs/notices.md); auto: "
        "whoever there seems to be",
    )
    notices_at: str = Field(
        "",
        description="base address of the metadata service or of the API server, HOST:PORT of Ray's "
        "head (default: where each usually is), or the file",
    )
    notices_every_seconds: float = Field(
        1.0, gt=0, description="the time from one question to the next, at least"
    )
    notices_account: str = Field(
        "/var/run/secrets/kubernetes.io/serviceaccount",
        description="Kubernetes: the folder with token, ca.crt and namespace",
    )
    notices_taints: str = Field(
        "",
        description="Kubernetes: more taints that end a node, as KEY or KEY=SECONDS with commas "
        "between; a KEY may end with *",
    )
    max_restarts_without_progress: int = Field(
        3, ge=0, description="new generations that end before a new step; then the run fails"
    )
    threads_per_worker: int = Field(0, ge=0, description="0: cores / workers")
    recovery: Literal["live", "restart"] = Field(
        "live",
        description="live: processes that are left go on with their state; restart: all are ended, "
        "and new ones begin from the newest snapshot or checkpoint",
    )
    standbys: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="idle processes that take the place of a lost worker at once, each of which "
        "costs memory; auto: 1 beside several workers",
    )
    node: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]*$",
        description="what this node is called among several; left out: the machine's name",
    )
    places: int = Field(
        0, ge=0, description="workers that a node has room for; 0: all of the run's"
    )
    min_nodes: int = Field(1, ge=1, description="with fewer the run does not go on")
    below_minimum: Literal["wait", "leave"] = Field(
        "wait",
        description="what too few nodes do with what they hold: wait for others, or save it and "
        "leave (exit code 3)",
    )
    below_minimum_seconds: float = Field(
        600.0, ge=0, description="how long they wait for others before they leave"
    )
    gather_seconds: float = Field(
        5.0, ge=0, description="the first generation waits so long for nodes beyond the least"
    )
    settle_seconds: float = Field(
        2.0, ge=0, description="a node that came is taken in when it has been there so long"
    )
    beat_seconds: float = Field(
        2.0, gt=0, description="from one heartbeat of a node to the next; after three it is lost"
    )
    alone_seconds: float = Field(
        20.0, gt=0, description="less than half of the nodes wait so long before they go on alone"
    )
    faults: str = Field(
        "",
        description="folder of orders by which workers break on purpose (holdfast chaos); left "
        "out: nobody looks for any",
    )

    @field_validator("node")
    @classmethod
    def _fits(cls, name: str) -> str:
        if len(name) > LONGEST_NAME:
            raise ValueError(
                f"a name of {len(name)} characters is too long, {LONGEST_NAME} are allowed: "
                "use a shorter one, such as node-1"
            )
        return name
