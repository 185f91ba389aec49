"""`cluster:` how agents and workers find and watch each other."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from holdfast.config.base import Section


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
    grace_seconds: float = Field(
        0,
        ge=0,
        description="from SIGTERM to the kill; 0: not known, a save takes as long as it does",
    )
    notices: Literal["none", "aws", "google", "azure", "file"] = Field(
        "none", description="who is asked whether this machine is about to go"
    )
    notices_at: str = Field(
        "", description="base address of the metadata service (default: the cloud's), or the file"
    )
    notices_every_seconds: float = Field(
        1.0, gt=0, description="the time from one question to the next"
    )
    max_restarts_without_progress: int = Field(
        3, ge=0, description="new generations that end before a new step; then the run fails"
    )
    threads_per_worker: int = Field(0, ge=0, description="0: cores / workers")
