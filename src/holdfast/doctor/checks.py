"""The checks of `holdfast doctor`: each looks at one thing and knows its remedy."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from holdfast.checkpoint.mover.socket_place import SOCKET_NAME, MoverSocket, make_socket_folder
from holdfast.core.devices import DEVICES
from holdfast.core.transports import NodeLinks
from holdfast.errors import RunFolderError, UserError
from holdfast.launch.node.process_limits import (
    OPEN_FILES_OF_AGENT,
    OPEN_FILES_PER_WORKER,
    TORCH_ADDRESS_BYTES,
)
from holdfast.machine.hardware import HardwareInfo, cpp_compiler, detect_hardware
from holdfast.machine.installed_versions import (
    TABLE_DATE,
    InstalledVersions,
    find_conflicts,
    read_installed_versions,
)
from holdfast.machine.links import detect_links
from holdfast.report.formatting import format_plural
from holdfast.wire.child_command import module_command

CheckState = Literal["good", "weak", "fails"]
GIB = 2**30
EQUAL_STEPS_S = 120.0  # Seconds for two small trainings on a device, with an import of torch
_NAMED_PORTS = 4
TORCH_RANGE = ((2, 11), (2, 13))  # oldest and newest release that is supported


@dataclass(frozen=True)
class Check:
    """`weak` is worth knowing and stops nothing; `fails` would stop a run."""

    name: str
    state: CheckState
    found: str
    remedy: str = ""
    where: str = ""  # a path, a key of the run store or of the run file; "": the name says it

    @property
    def mark(self) -> str:
        return {"good": "ok", "weak": "note", "fails": "FAIL"}[self.state]

    @property
    def sentence(self) -> str:
        """What was found, where, and what to do."""
        place = f" ({self.where})" if self.where else ""
        return f"{self.found}{place}" + (f"; {self.remedy}" if self.remedy else "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def failed_check(name: str, error: Exception, where: str, remedy: str = "") -> Check:
    """Return the check of what an error says, which may have its own remedy and place."""
    if isinstance(error, UserError):
        return Check(name, "fails", error.message, error.remedy or remedy, where)
    return Check(name, "fails", str(error), remedy, where)


def run_checks(folder: Path | None = None) -> list[Check]:
    """Every check, in order; `folder` is where runs would be written (default: here)."""
    machine = detect_hardware()
    here = Path() if folder is None else folder
    with_machine: tuple[Callable[[HardwareInfo], Check], ...] = (
        _system,
        _cores,
        _memory,
        _shared_memory,
        check_accelerators,
    )
    return [
        *(check(machine) for check in with_machine),
        *([check_links(machine, detect_links())] if machine.accelerators else []),
        *_equal_steps(machine),
        Check("python", "good", f"{platform.python_version()} at {sys.executable}"),
        _torch(),
        _compiler(),
        _disk(here),
        _open_files(),
        _memory_limits(),
        _sockets(),
        _loopback(),
        _clock(),
    ]


def _system(machine: HardwareInfo) -> Check:
    if platform.system() == "Linux":
        return Check("system", "good", machine.system)
    if platform.system() == "Darwin":
        return Check(
            "system",
            "weak",
            f"{machine.system}, where one worker process is supported",
            "set layout.workers=1; use Linux for more",
        )
    return Check("system", "fails", machine.system, "Holdfast runs on Linux")


def _cores(machine: HardwareInfo) -> Check:
    return Check("cores", "good", f"{machine.cores} usable")


def _memory(machine: HardwareInfo) -> Check:
    found = f"{machine.memory_bytes / GIB:.1f} GiB"
    if machine.memory_bytes < 2 * GIB:
        return Check("memory", "fails", found, "two workers need about 2 GiB: raise the limit")
    return Check("memory", "good", found)


def _shared_memory(machine: HardwareInfo) -> Check:
    found = f"{machine.shared_memory_bytes / GIB:.2f} GiB free in /dev/shm"
    if platform.system() == "Linux" and machine.shared_memory_bytes < GIB // 16:
        return Check("shared memory", "weak", found, "in a container, start it with --shm-size=1g")
    return Check("shared memory", "good", found)


def check_accelerators(machine: HardwareInfo) -> Check:
    if not machine.accelerators:
        return Check("accelerators", "good", "none: device auto means cpu")
    names = ", ".join(f"{a.name} ({a.memory_bytes / GIB:.0f} GiB)" for a in machine.accelerators)
    if machine.torch_computes_on == "CPU":
        return Check(
            "accelerators",
            "fails",
            f"{names}, but torch was built for the CPU alone",
            "install a torch that was built for them, or use device=cpu",
        )
    kind = DEVICES[machine.accelerators[0].kind]
    backends = " and ".join(kind.backends)
    library = ", ".join(f"{each} {found}" for each in kind.packages if (found := _installed(each)))
    found = f"{names}; device {kind.name}, backend {backends}{f' ({library})' if library else ''}"
    found += f"; torch for {machine.torch_computes_on}"
    if len({each.name for each in machine.accelerators}) > 1:
        remedy = "a run on several kinds of cards needs train.deterministic=false"
        return Check("accelerators", "weak", found, remedy)
    return Check("accelerators", "good", found)


def check_links(machine: HardwareInfo, links: NodeLinks) -> Check:
    """How the cards are joined, to one another and to other machines."""
    count = len(machine.accelerators)
    found = f"{_describe_cards(count, links)}; {_describe_ports(links)}"
    return Check("links", "good", f"{found}; `worker_ready` in the journal names what is used")


def _describe_cards(count: int, links: NodeLinks) -> str:
    if count == 1:
        return "one card"
    pairs = count * (count - 1) // 2
    names = ", ".join(sorted({link.name for link in links.cards}))
    if not names:
        return f"no NVLink or xGMI between {count} cards"
    return f"{names} between {len(links.cards)} of {format_plural(pairs, 'pair')} of cards"


def _describe_ports(links: NodeLinks) -> str:
    if not links.ports:
        return "no active port of InfiniBand, RoCE or EFA, so nodes are joined by TCP"
    named = ", ".join(str(port) for port in links.ports[:_NAMED_PORTS])
    more = len(links.ports) - _NAMED_PORTS
    return f"active: {named}{f' and {more} more' if more > 0 else ''}"


def _equal_steps(machine: HardwareInfo) -> list[Check]:
    """Train twice on the accelerator and compare the bits. A CPU's kernels add in a fixed order."""
    if not machine.accelerators or machine.torch_computes_on == "CPU":
        return []
    device = DEVICES[machine.accelerators[0].kind].device(0)
    return [check_equal_steps(device)]


def check_equal_steps(device: str) -> Check:
    """Two equal trainings of a small decoder on a device, in a process of their own."""
    name, command = "equal steps", module_command("holdfast.training.measure.equal_steps", device)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=EQUAL_STEPS_S)
    except subprocess.TimeoutExpired:
        found = f"a small training on {device} did not end within {EQUAL_STEPS_S:.0f} s"
        return Check(name, "fails", found, "look at the device's driver, or use device=cpu")
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        found = f"a small training on {device} failed: {said}"
        return Check(name, "fails", found, "look at the device's driver, or use device=cpu")
    told = json.loads(done.stdout)
    if told["unequal"]:
        count = format_plural(len(told["unequal"]), "tensor")
        found = f"two equal trainings on {device} differ in {count}"
        return Check(name, "weak", found, "a killed run may end at other bits on this device")
    return Check(name, "good", f"two equal trainings on {device} have the same bits")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _torch() -> Check:
    oldest, newest = (".".join(map(str, bound)) for bound in TORCH_RANGE)
    try:
        found = version("torch")
    except PackageNotFoundError:
        return Check("torch", "fails", "not installed", f"pip install 'torch=={newest}.*'")
    release = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if "dev" in found or not TORCH_RANGE[0] <= release <= TORCH_RANGE[1]:
        return Check(
            "torch",
            "fails",
            f"{found}, but {oldest} to {newest} are supported",
            f"pip install 'torch=={newest}.*'",
        )
    return Check("torch", "good", found)


def _compiler() -> Check:
    found = cpp_compiler(os.environ)
    if found is None:
        return Check(
            "compiler",
            "weak",
            "no C++ compiler, which train.compile needs on a CPU",
            "install g++, or leave train.compile at false",
        )
    return Check("compiler", "good", found)


def _disk(folder: Path) -> Check:
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(
            "disk",
            "fails",
            f"{folder.resolve()} cannot be written ({error.strerror})",
            "change to a folder that you can write",
        )
    found = f"{free / GIB:.1f} GiB free in {folder.resolve()}"
    if free < GIB:
        return Check("disk", "weak", found, "a run writes checkpoints: make room")
    return Check("disk", "good", found)


def _open_files() -> Check:
    """A start raises the soft limit to the hard one, which alone counts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (at most {hard})"
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES_OF_AGENT + OPEN_FILES_PER_WORKER:
        return Check("open files", "fails", found, "raise it: ulimit -Hn 4096")
    if hard != resource.RLIM_INFINITY and hard < 1024:
        return Check("open files", "weak", found, "raise it: ulimit -Hn 4096")
    return Check("open files", "good", found)


def _memory_limits() -> Check:
    """A limit of address space under which no process can import torch."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft == resource.RLIM_INFINITY:
        return Check("address space", "good", "no limit")
    found = f"{soft / GIB:.2f} GiB for a process"
    if soft < TORCH_ADDRESS_BYTES:
        least = f"a worker needs {TORCH_ADDRESS_BYTES / GIB:.2f} GiB and more"
        return Check("address space", "fails", found, f"{least}: ulimit -v unlimited")
    return Check("address space", "weak", found, "a large model needs more: ulimit -v unlimited")


def _sockets() -> Check:
    """The processes of a node talk over a unix socket: make one where a start would."""
    try:
        with make_socket_folder() as folder:
            MoverSocket(str(Path(folder) / SOCKET_NAME)).remove()
    except RunFolderError as error:
        return Check("sockets", "fails", error.message, f"{error.where}: {error.remedy}")
    return Check("sockets", "good", f"in {Path(folder).parent}")


def _loopback() -> Check:
    """Processes of a run talk over 127.0.0.1: carry one byte across it."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5)
            with socket.create_connection(server.getsockname(), timeout=5) as near:
                far, _ = server.accept()
                with far:
                    near.sendall(b"x")
                    far.settimeout(5)
                    good = far.recv(1) == b"x"
    except OSError as error:
        return Check(
            "loopback",
            "fails",
            f"127.0.0.1 does not carry bytes ({error})",
            "bring it up: ip link set lo up",
        )
    return Check("loopback", "good" if good else "fails", "127.0.0.1 works")


def _clock() -> Check:
    """A clock before the release of the code is wrong; signed requests would look stale."""
    year = time.gmtime().tm_year
    found = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    if year < 2026:
        return Check("clock", "fails", found, "set the date: this one lies in the past")
    return Check("clock", "good", found)


# --- versions of driver, CUDA, NCCL, OFED and kernel --------------------------------------------
NAME = "versions"
_LABELS = {
    "driver": "driver",
    "cuda": "CUDA of torch",
    "nccl": "NCCL",
    "nccl_on_path": "NCCL in LD_LIBRARY_PATH",
    "ofed": "OFED",
    "kernel": "kernel",
}


def run_version_checks() -> list[Check]:
    found = read_installed_versions()
    return check_versions(found, has_ports=found.has_nvidia and bool(detect_links().ports))


def check_versions(found: InstalledVersions, has_ports: bool) -> list[Check]:
    """Name what does not go together; nothing for a machine without NVIDIA's driver."""
    if not found.has_nvidia:
        return []
    if (broken := _broken_driver(found)) is not None:
        return [broken]
    told = ", ".join(
        f"{label} {found.known[n]}" for n, label in _LABELS.items() if n in found.known
    )
    conflicts = find_conflicts(found, has_ports)
    if not conflicts:
        return [Check(NAME, "good", f"{told}; no known conflict (table of {TABLE_DATE})")]
    return [
        Check(
            NAME,
            each.state,
            f"{each.effect} ({told}; {each.source}, read on {each.read_on})",
            each.remedy,
            each.culprit,
        )
        for each in conflicts
    ]


def _broken_driver(found: InstalledVersions) -> Check | None:
    """A driver whose libraries do not fit the loaded module, or that does not answer."""
    driver, module = found.known.get("driver", ""), found.known.get("driver_module", "")
    if "version mismatch" in found.tool_words or (driver and module and driver != module):
        loaded = f"the kernel has loaded driver {module or 'of another version'}"
        here = f"the libraries are {driver}" if driver else f"nvidia-smi says: {found.tool_words}"
        return Check(
            NAME,
            "fails",
            f"{loaded}, but {here}",
            "restart the machine, or load the new module: rmmod nvidia; modprobe nvidia",
            "driver",
        )
    if not driver and module:
        return Check(
            NAME,
            "fails",
            f"driver {module} is loaded, but nvidia-smi lists no card: {found.tool_words}",
            "in a container, start it with --gpus all or the runtime of NVIDIA's toolkit",
            "driver",
        )
    return None
