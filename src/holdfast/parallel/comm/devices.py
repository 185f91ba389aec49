"""The part of the device table that needs torch. `core/devices.py` has the table itself."""

from __future__ import annotations

import hashlib
import os
import platform
from typing import Any

import torch
import torch.distributed as dist

from holdfast.core.devices import DeviceKind, device_kind
from holdfast.errors import LayoutError, UserError
from holdfast.machine.numa import device_numa_node
from holdfast.machine.processor import processor_identity


def select_device(device: torch.device) -> None:
    """Let this process compute on `device` from now on. Call it after the fork and before the first
    tensor: other devices then get no context of this process. Raises UserError if torch does not
    see the device."""
    kind = device_kind(device.type)
    if kind.is_host:
        return
    found = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if found is not None else 0
    index = device.index or 0
    if found is None or found.type != kind.name or index >= count:
        there = "no device" if found is None else f"{count} of {found.type}"
        raise UserError(
            f"this worker was given {device}, but torch sees {there}",
            where="device",
            remedy="use device=cpu",
        )
    if kind.has_index:
        torch.accelerator.set_device_index(index)
        # Now: torch's DeviceMesh takes another device, by rank, if the process has used none yet.
        module: Any = torch.get_device_module(device)
        module.init()


def memory_outside_torch(device: torch.device) -> int:
    """Return the bytes of a device that are used, and not by this process's tensors: contexts and
    communicators, of other processes too."""
    module: Any = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    return int(total) - int(free) - int(module.memory_reserved(device))


def check_backends(kind: DeviceKind) -> None:
    """Raises LayoutError if this torch lacks a backend that several workers need."""
    for backend in kind.backends:
        if not dist.is_backend_available(backend):
            raise LayoutError(
                f"several workers on {kind.name} need the backend {backend}, which this torch does "
                "not have",
                where="layout.workers",
                remedy="use 1 worker, or device: cpu",
            )


def describe_device(device: torch.device, kind: DeviceKind) -> str:
    """Return a device with the backends that its workers use, for the journal: "cuda:1, nccl
    2.28.9" for example."""
    words = [f"{name} {backend_version(name)}".rstrip() for name in kind.backends]
    how = " through host memory" if kind.is_staged else ""
    return f"{device}, {', '.join(words)}{how}"


def describe_processor(device: torch.device) -> str:
    """Return what the bits of a result depend on: "x86_64 AVX512 (5f0c1d2e), torch 2.11.0" for
    example. In brackets is a digest of the vendor, the vector units, and variables that choose.
    """
    if device_kind(device.type).is_host:
        units = hashlib.sha256(repr(processor_identity(os.environ)).encode()).hexdigest()[:8]
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} ({units})"
    else:
        module: Any = torch.get_device_module(device)
        name = str(module.get_device_name(device))
    return f"{name}, torch {torch.__version__}"


def near_numa_node(device: torch.device) -> int | None:
    """Return the NUMA node whose memory is near the device. None: any is, or torch does not tell
    where the device is."""
    kind = device_kind(device.type)
    if kind.is_host or not kind.has_index:
        return None
    module: Any = torch.get_device_module(device)
    found = module.get_device_properties(device)
    numbers = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in numbers:
        return None
    domain, bus, slot = numbers
    return device_numa_node(f"{domain:04x}:{bus:02x}:{slot:02x}.0")


def backend_version(backend: str) -> str:
    """Return the version of a backend's library; "" if torch does not say it."""
    if backend != "nccl" or not dist.is_nccl_available():
        return ""
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def has_bf16_products(device: torch.device) -> bool:
    """Return False for a card that only emulates bf16."""
    if device.type != "cuda":
        return True
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))
