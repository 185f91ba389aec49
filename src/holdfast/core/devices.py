"""The kinds of devices that a worker may compute on, and what each of them can do.

It is the only place that asks for a device's name. All other code reads a capability from the
table. `parallel/comm/devices.py` has the part that needs torch.

Nothing here has run on several devices: the entries come from the source of torch 2.13 and of NCCL
(docs/guide/accelerators.md says which). ROCm is `cuda`, as in torch, and its backend is then RCCL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.config.run import RunConfig

GLOO = "gloo"
STAGED_GLOO = "stagedgloo"
"""Our name in torch's registry for gloo that copies a device's tensors through the host's memory
(`parallel/comm/staged_group.py`). torch gives a mesh of devices over plain gloo to NCCL."""


@dataclass(frozen=True)
class DeviceKind:
    """One kind of device.

    name: torch's name of the kind, and the run file's.
    inside, between: torch's backends for tensors on the device: inside a replica and between
        replicas. With `gloo`, tensors travel through the host's memory.
    has_index: a process chooses one of several devices by its index.
    fills_node: if the run file names no number, a run has a worker for each device of its node.
    most_workers: of a run; 0: any number.
    ranks_per_device: processes that may compute on one device; 0: any number.
    can_abort: `abort()` of a group inside a replica frees every wait in it, and the process can
        make new groups then. Otherwise a process that has lost a peer there is replaced.
    regroups_per_process: groups of a backend leak device memory; after so many new sets of groups
        a process is replaced. 0: never.
    regroup_growth_bytes: the same, for the device memory that is used next to torch's own, compared
        with the first generation. 0: it is not read.
    can_pin: the pages of a shared mapping can be locked for direct copies.
    lowest_stream_priority: of a stream that copies while other streams compute.
    pins_batches: batches are copied to the device from locked pages.
    has_nvtx: NVTX names ranges of what runs on it.
    chunk_elements: logits that the loss holds at a time.
    float8_capability: the least compute capability with float8 products; (): no device of the kind.
    settings: environment of a worker, set before torch is imported. They replace a person's own.
    visible_by: the environment variable that chooses among a node's devices.
    packages: installed packages whose versions decide what the backend does.
    log_variable: environment variable that names a file, in which the backend tells how it
        connects; "": it does not tell. log_settings: environment that makes it do so.
    """

    name: str
    inside: str
    between: str
    has_index: bool = True
    fills_node: bool = False
    most_workers: int = 0
    ranks_per_device: int = 1
    can_abort: bool = True
    regroups_per_process: int = 0
    regroup_growth_bytes: int = 0
    can_pin: bool = False
    lowest_stream_priority: int = 0
    pins_batches: bool = True
    has_nvtx: bool = False
    chunk_elements: int = 2**28
    float8_capability: tuple[int, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)
    visible_by: str = ""
    packages: tuple[str, ...] = ()
    log_variable: str = ""
    log_settings: Mapping[str, str] = field(default_factory=dict, hash=False)

    def device(self, index: int) -> str:
        """Return the name of one device of this kind, as torch reads it."""
        return f"{self.name}:{index}" if self.has_index else self.name

    def chunk_tokens(self, vocabulary: int, asked: int | str = "auto") -> int:
        """Return the tokens whose logits the loss holds at a time. asked: `train.loss_chunk`.

        They do not depend on any layout, because they decide the order of additions in the head's
        gradient. An accelerator gets a power of two: full tiles of its matrix units, and no odd
        last chunk.
        """
        if isinstance(asked, int):
            return asked
        fitting = max(64, self.chunk_elements // vocabulary)
        return fitting if self.is_host else 1 << (fitting.bit_length() - 1)

    @property
    def inside_has_tags(self) -> bool:
        """Return True if messages inside a replica have tags, and end when a peer is lost."""
        return self.inside in (GLOO, STAGED_GLOO)

    @property
    def between_has_tags(self) -> bool:
        """Return True if the same holds between replicas."""
        return self.between == GLOO

    @property
    def backends(self) -> tuple[str, ...]:
        """Return the libraries that its workers exchange data with."""
        return tuple(sorted({self.inside.replace(STAGED_GLOO, GLOO), self.between}))

    @property
    def is_staged(self) -> bool:
        """Return True if all exchanges copy tensors through the host's memory."""
        return self.inside == STAGED_GLOO

    def staged(self, ranks_per_device: int) -> DeviceKind:
        """Return the kind for workers that exchange data over gloo alone. It needs no group of the
        device, so no process wears out."""
        return replace(
            self,
            inside=STAGED_GLOO,
            between=GLOO,
            ranks_per_device=self.ranks_per_device and ranks_per_device,
            can_abort=True,
            regroups_per_process=0,
            regroup_growth_bytes=0,
            packages=(),
            log_variable="",
        )

    @property
    def is_host(self) -> bool:
        """Return True if the device's memory is the host's."""
        return self.name == "cpu"


_NCCL_SETTINGS = MappingProxyType(
    {
        # Without these the backend's watchdog ends a process that has lost a peer.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        # The watchdog would ask our store once a second, or write to it.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_PROPAGATE_ERROR": "0",
        # It sleeps four times this after an error, and the end of a group waits for it.
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
        "TORCH_INCLUDE_STACK_TRACE": "0",  # a dump that waits for the interpreter can deadlock
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        "TORCH_NCCL_ENABLE_TIMING": "1",  # the flight recorder then knows what has begun
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",  # seconds that a new communicator may take
        "NCCL_NVLS_ENABLE": "0",  # it can neither be made again nor repeat its bits
        "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # several communicators on one device
    }
)

_NCCL_LOG = MappingProxyType({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM,ENV"})

DEVICES: Mapping[str, DeviceKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            DeviceKind(
                "cpu",
                inside="gloo",
                between="gloo",
                has_index=False,
                ranks_per_device=0,
                pins_batches=False,
                chunk_elements=2**24,
            ),
            DeviceKind(
                "cuda",
                inside="nccl",
                between="nccl",
                fills_node=True,
                has_nvtx=True,
                regroups_per_process=32,  # not measured
                regroup_growth_bytes=2**32,  # not measured; a standby's context is in it
                can_pin=True,
                float8_capability=(8, 9),
                settings=_NCCL_SETTINGS,
                visible_by="CUDA_VISIBLE_DEVICES",
                packages=("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
                log_variable="NCCL_DEBUG_FILE",
                log_settings=_NCCL_LOG,
            ),
            DeviceKind(
                "xpu",
                inside="xccl",
                between="gloo",
                can_abort=False,
                visible_by="ZE_AFFINITY_MASK",
                lowest_stream_priority=1,
            ),
            DeviceKind(
                "mps",
                inside="gloo",
                between="gloo",
                has_index=False,
                most_workers=1,
                pins_batches=False,
            ),
        )
    }
)
"""By torch's name of the kind."""


def device_kind(device: str) -> DeviceKind:
    """Return the kind of a device by its name ("cuda:1", "cpu"). Raises KeyError for an unknown
    kind."""
    return DEVICES[device.partition(":")[0]]


def run_device_kind(config: RunConfig, device: str = "") -> DeviceKind:
    """Return the kind of a run's device, with the exchange that its run file asks for. device: in
    place of the run file's. Raises KeyError if the device is not planned yet."""
    kind, cluster = device_kind(device or config.device), config.cluster
    shares = cluster.workers_per_device > 1
    is_staged = shares or (cluster.backend == GLOO and not kind.is_host)
    return kind.staged(cluster.workers_per_device) if is_staged else kind


def is_accelerator(device: str) -> bool:
    """Return True if a device of the run file is a planned accelerator."""
    return device in DEVICES and not DEVICES[device].is_host
