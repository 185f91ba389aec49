"""What Ray refuses, as sentences for the user."""

from __future__ import annotations

from holdfast.errors import ConfigError
from holdfast.launch.owners.owner import OwnerAwayError

ADDRESS_KEY = "launch.ray.address"


def explain(kind: str, detail: str, address: str) -> ConfigError:
    """Return the error for a kind of refusal of `job.py`."""
    return (
        _of_connection(kind, detail, address)
        or _of_job(kind, detail, address)
        or ConfigError(f"the Ray cluster at {address} refused: {detail}", where=ADDRESS_KEY)
    )


def _of_connection(kind: str, detail: str, address: str) -> ConfigError | None:
    match kind:
        case "absent":
            return ConfigError(
                f"ray cannot be imported here ({detail})",
                where="launch.on",
                remedy="install it with: pip install 'holdfast[ray]'",
            )
        case "unreachable":
            return ConfigError(
                f"no Ray cluster answers at {address} ({detail})",
                where=ADDRESS_KEY,
                remedy="use the address that ray start --head prints",
            )
        case "away":
            return OwnerAwayError(
                f"Ray's head at {address}, which knows the nodes of this run, does not answer "
                f"({detail})",
                where="--on ray",
                remedy="start that head again, or resume the run on another Ray cluster: "
                "holdfast launch RUN --on ray launch.ray.address=HOST:PORT",
            )
        case "no_head":
            return ConfigError(
                f"what answers at {address} is no head of a Ray cluster ({detail})",
                where=ADDRESS_KEY,
                remedy="use the address that ray start --head prints",
            )
        case "silent":
            return ConfigError(
                f"{address} does not answer as Ray's head does within {detail} s",
                where=ADDRESS_KEY,
                remedy="use the address that ray start --head prints",
            )
        case "outside":
            return ConfigError(
                f"this machine is not part of the Ray cluster at {address}",
                where=ADDRESS_KEY,
                remedy="call this command on a machine of the cluster, or use ray://HOST:10001",
            )
        case "versions":
            return ConfigError(
                f"the cluster at {address} has another Ray or Python than this machine: {detail}",
                where=ADDRESS_KEY,
                remedy="install the cluster's versions here",
            )
    return None


def _of_job(kind: str, detail: str, address: str) -> ConfigError | None:
    match kind:
        case "resources":
            return ConfigError(
                f"no machine of the Ray cluster has what a node takes: {detail}",
                where="launch.ray",
                remedy="set launch.ray.cpus, gpus and resources to what a machine has, or "
                "launch.ray.autoscaler to true",
            )
        case "shared":
            return ConfigError(
                f"nodes of the run would share a machine: {detail}",
                where="launch.ray",
                remedy="set launch.ray.cpus to more than half of a machine's, or "
                "launch.ray.groups to run",
            )
        case "running":
            return ConfigError(
                f"the Ray cluster at {address} has nodes of this run already (job {detail})",
                where="launch.on",
                remedy="end them with holdfast down, or wait until they have ended",
            )
        case "start":
            return ConfigError(
                f"Ray cannot start a process of holdfast: {detail}",
                where="launch.ray.runtime_env",
                remedy="install holdfast[ray] on the machines of the cluster, or name it under pip",
            )
    return None
