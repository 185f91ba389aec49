"""Whether this machine and its torch have the devices that a run asks for."""

from __future__ import annotations

from importlib.util import find_spec

from holdfast.config.loading.load import LoadedConfig
from holdfast.config.run import RunConfig
from holdfast.core.devices import DEVICES, GLOO, is_accelerator
from holdfast.errors import ConfigError
from holdfast.machine.accelerators import compute_capabilities
from holdfast.machine.hardware import HardwareInfo

_BUILDS = {"cuda": ("CUDA", "ROCm"), "xpu": ("XPU",)}
"""What torch must have been built for, by kind of device."""


def default_places(config: RunConfig, machine: HardwareInfo) -> tuple[int, str]:
    """Return the places for workers if the run file names no number, and why there are so many."""
    kind = DEVICES.get(config.device)
    if kind is None or not kind.fills_node or config.cluster.node:
        return 1, "one copy of the model"
    count = sum(each.kind == kind.name for each in machine.accelerators)
    shared = config.cluster.workers_per_device
    why = f"for the {kind.name} devices of {machine.node}, of which it has {count}"
    return max(1, count) * shared, why + (f", with {shared} workers each" if shared > 1 else "")


def refuse_devices(loaded: LoadedConfig, machine: HardwareInfo) -> None:
    """Raises ConfigError if the run's device, or so many of them, are not here."""
    config = loaded.config
    _refuse_backend(loaded)
    if not is_accelerator(config.device):
        return
    kind = DEVICES[config.device]
    found = [each for each in machine.accelerators if each.kind == kind.name]
    key = "cluster.places" if config.cluster.node else "layout.workers"
    workers = (config.cluster.places or 1) if config.cluster.node else config.layout.workers
    shared = config.cluster.workers_per_device
    if workers > len(found) * shared and kind.ranks_per_device:
        more = f" with {shared} workers each" if shared > 1 else ""
        each = f", cluster.workers_per_device={-(-workers // len(found))}" if found else ""
        raise ConfigError(
            f"{key} is {workers}, but this machine has {len(found)} accelerators{more}"
            if found
            else f"device is {config.device}, but this machine has none",
            where=loaded.where(key if found else "device"),
            remedy=f"use {len(found) * shared}{each}, or device=cpu" if found else "use device=cpu",
        )
    if machine.torch_computes_on == "CPU" and kind.name in _BUILDS:
        raise ConfigError(
            f"{found[0].name} is here, but torch was built for the CPU alone",
            where=loaded.where("device"),
            remedy="install a torch that was built for it, or use device=cpu",
        )
    build = machine.torch_computes_on.partition(" ")[0]
    if build and kind.name in _BUILDS and build not in _BUILDS[kind.name]:
        raise ConfigError(
            f"device {kind.name} needs a torch for {' or '.join(_BUILDS[kind.name])}, and this one "
            f"is for {build}",
            where=loaded.where("device"),
            remedy="install another torch, or use device=cpu",
        )
    names = sorted({each.name for each in found[: -(-workers // shared)]})
    if len(names) > 1 and config.train.deterministic:
        raise ConfigError(
            f"the workers' devices differ ({', '.join(names)}), so they give unlike bits",
            where=loaded.where("train.deterministic"),
            remedy=f"choose like ones by {kind.visible_by}, or use train.deterministic=false",
        )
    if kind.most_workers and config.layout.workers > kind.most_workers:
        raise ConfigError(
            f"layout.workers is {config.layout.workers}, but a run on {kind.name} has one worker",
            where=loaded.where("layout.workers"),
            remedy="use 1, or device=cpu",
        )


def _refuse_backend(loaded: LoadedConfig) -> None:
    """Raises ConfigError if the library of exchanges, or workers on a device, do not go with it."""
    config, cluster = loaded.config, loaded.config.cluster
    kind = DEVICES[config.device]
    if cluster.backend not in ("auto", GLOO, kind.inside):
        raise ConfigError(
            f"cluster.backend {cluster.backend} is not for device {kind.name}, whose library is "
            f"{kind.inside}",
            where=loaded.where("cluster.backend"),
            remedy="use cluster.backend=auto",
        )
    if cluster.workers_per_device > 1 and kind.most_workers:
        raise ConfigError(
            f"cluster.workers_per_device is {cluster.workers_per_device}, but a run on {kind.name} "
            "has one worker",
            where=loaded.where("cluster.workers_per_device"),
            remedy="use cluster.workers_per_device=1, or device=cpu",
        )


def refuse_float8(loaded: LoadedConfig, machine: HardwareInfo) -> None:
    """Raises ConfigError if the run computes in float8, and its device or its packages cannot."""
    config = loaded.config
    if config.train.precision != "fp8":
        return
    where, least = loaded.where("train.precision"), DEVICES[config.device].float8_capability
    if not least or machine.torch_computes_on.startswith("ROCm"):
        raise ConfigError(
            "train.precision fp8 needs an NVIDIA device of compute capability 8.9 or more, and "
            f"device is {config.device}",
            where=where,
            remedy="use train.precision=bf16",
        )
    used = {each.name for each in machine.accelerators}
    for name, found in compute_capabilities():
        if name in used and found < least:
            raise ConfigError(
                f"train.precision fp8 needs compute capability {'.'.join(map(str, least))}, and "
                f"{name} has {'.'.join(map(str, found))}",
                where=where,
                remedy="use train.precision=bf16",
            )
    if find_spec("torchao") is None:
        raise ConfigError(
            "train.precision fp8 needs the package torchao, which is not installed",
            where=where,
            remedy="install it with pip install 'holdfast[fp8]', or use train.precision=bf16",
        )


def describe_devices(loaded: LoadedConfig) -> list[str]:
    """Lines about a number of workers that is planned, and about what has not run on devices."""
    config, planned = loaded.config, loaded.origins["layout.workers"]
    if not is_accelerator(config.device) or config.layout.workers == 1:
        return []
    workers, key = f"{config.layout.workers} workers on {config.device}", "layout.workers"
    why = f" ({planned.place}; set {key} for another number)" if planned.kind == "planned" else ""
    shared = config.cluster.workers_per_device
    what = "several devices have" if shared == 1 else f"{shared} workers on a device have"
    return [
        f"{workers}{why}: {what} only been run with stand-ins so far (docs/guide/accelerators.md)"
    ]
