"""Do gradients cross the network in plain sight, and does WireGuard hide them?

Two nodes of one run live in network namespaces of their own. They train the same three steps twice,
over the bare line and over WireGuard (`wireguard-go`, in user space). A sniffer on the line keeps
every frame. The script of the run writes its gradients to files. So it is known which bytes to look
for: all windows of 16 bytes of them. Those that the bare line showed are looked for in the tunnel's
frames.

    python -m benchmarks.runtime.tunnel [--steps N] [--width N]     needs root, wg, wireguard-go

The exit code is 0 if the bare line shows at least 1,000,000 bytes, and the tunnel none of them.
Both runs must have equal losses.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.runtime.accelerator.journal import read_events
from holdfast.events import StepDone
from holdfast_lab.chaos.network import Network

NODES = ("one", "two")
TUNNEL = "10.99.0"
PORT = 51_820
WINDOW = 16
ASKED = 1_000_000
"""Bytes of gradients that the bare line must show, so that the check can fail."""

SCRIPT = """
import os, sys
import torch
from torch import nn
import torch.nn.functional as F
import holdfast

steps, width, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

class Points:
    version = "tunnel-1"
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        return {"x": torch.randn(width, generator=g), "y": torch.randn(width, generator=g)}

class Watched(nn.Linear):
    def forward(self, x):
        weight = self.weight.view_as(self.weight)
        if weight.requires_grad:
            weight.register_hook(keep)
        return F.linear(x, weight, self.bias)

def keep(gradient):
    out.write(gradient.contiguous().numpy().tobytes())

out = open(f"{folder}/{os.getpid()}.gradients", "ab")
model = nn.Sequential(Watched(width, width), nn.Tanh(), Watched(width, width))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run = holdfast.run()
run.keep(model, optimizer)
points = Points()
for step in run.steps(steps, batch_size=32, microbatch_size=16):
    for batch in step.batches(points):
        loss = F.mse_loss(model(batch["x"]), batch["y"], reduction="sum")
        step.backward(loss, weight=batch["y"].numel())
    step.apply()
    out.flush()
"""

SNIFFER = """
import socket, sys
line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
line.setsockopt(socket.SOL_SOCKET, 33, 512 * 2**20)  # SO_RCVBUFFORCE
line.bind(("eth0", 0))
print("ready", flush=True)
with open(sys.argv[1], "wb", buffering=2**20) as kept:
    while True:
        kept.write(line.recv(2**17))
        kept.flush()
"""


@dataclass(frozen=True)
class Found:
    """One way of the bytes."""

    losses: tuple[float, ...]  # of each step
    step_s: float  # median seconds of a step
    cpu_s: float  # CPU seconds of the nodes
    tunnel_cpu_s: float  # CPU seconds of the tunnel's processes
    captured: NDArray[np.uint8]  # every byte of the line
    gradients: NDArray[np.uint64]  # windows of what the script computed


def _command(words: Sequence[str], text: str = "") -> str:
    done = subprocess.run(words, check=True, capture_output=True, text=True, input=text)
    return done.stdout.strip()


def _wait_for(device: str, inside: Sequence[str]) -> None:
    for _ in range(600):
        shown = subprocess.run([*inside, "wg", "show", device], check=False, capture_output=True)
        if shown.returncode == 0:
            return
        time.sleep(0.1)
    raise SystemExit(f"wireguard-go made no device {device}: {shown.stderr.decode()}")


@contextmanager
def _tunnel(network: Network) -> Iterator[list[subprocess.Popen[bytes]]]:
    """WireGuard between the two nodes: devices hfwg1 and hfwg2."""
    keys = [_command(["wg", "genkey"]) for _ in NODES]
    public = [_command(["wg", "pubkey"], f"{key}\n") for key in keys]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, name in enumerate(NODES, start=1):
            device, inside = f"hfwg{number}", network.command(name)
            Path(f"/var/run/wireguard/{device}.sock").unlink(missing_ok=True)
            process = subprocess.Popen(
                [*inside, "wireguard-go", "-f", device],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            started.append(process)
            _wait_for(device, inside)
            peer = 2 - number  # index of the other
            settings = ["private-key", "/dev/stdin", "listen-port", str(PORT)]
            settings += ["peer", public[peer], "allowed-ips", f"{TUNNEL}.{3 - number}/32"]
            settings += ["endpoint", f"{network.address(NODES[peer])}:{PORT}"]
            _command([*inside, "wg", "set", device, *settings], f"{keys[number - 1]}\n")
            address = f"{TUNNEL}.{number}/24"
            _command([*inside, "ip", "address", "add", address, "dev", device])
            _command([*inside, "ip", "link", "set", device, "mtu", "1420", "up"])
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def _settings(network: Network, name: str, in_tunnel: bool) -> list[str]:
    if not in_tunnel:
        return network.settings(name)
    number = NODES.index(name) + 1
    address = f"{TUNNEL}.{number}"
    return [
        f"cluster.interface={address}",
        f"cluster.gloo_interface=hfwg{number}",
        f"checkpoint.peer_interface={address}",
    ]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _hashes(data: NDArray[np.uint8], offset: int = 0) -> NDArray[np.uint64]:
    """A hash of each window from an offset on. Two of a million windows are alike by chance once in
    10^7 runs."""
    there = data[offset:]
    words = np.frombuffer(there[: len(there) // WINDOW * WINDOW].tobytes(), np.uint64)
    first, second = words[::2], words[1::2]
    mixed = (first ^ (first >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (second * np.uint64(0xC2B2AE3D27D4EB4F))


def _windows(data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Hashes of different windows. Those of few different bytes, such as zeros, are left out."""
    whole = data[: len(data) // WINDOW * WINDOW].reshape(-1, WINDOW)
    is_rich = (np.diff(np.sort(whole, axis=1), axis=1) > 0).sum(axis=1) >= WINDOW // 2
    return np.unique(_hashes(whole[is_rich].ravel()))


def seen(windows: NDArray[np.uint64], captured: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the windows that some place of the captured bytes has, at whatever offset."""
    low = np.uint64(2**24 - 1)
    is_likely, found = np.zeros(2**24, bool), np.zeros(len(windows), bool)
    is_likely[windows & low] = True
    for offset in range(WINDOW):
        there = _hashes(captured, offset)
        found |= np.isin(windows, there[is_likely[there & low]])
    return windows[found]


def train(network: Network, folder: Path, steps: int, width: int, in_tunnel: bool) -> Found:
    """Train on the two nodes, with a sniffer on the line of the first."""
    kept, dumps = folder / "frames", folder / "gradients"
    dumps.mkdir(parents=True)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    with ExitStack() as stack:
        tunnel = stack.enter_context(_tunnel(network)) if in_tunnel else []
        sniffer = subprocess.Popen(
            [*network.command(NODES[0]), sys.executable, "-c", SNIFFER, str(kept)],
            stdout=subprocess.PIPE,
        )
        stack.callback(sniffer.wait)
        stack.callback(sniffer.kill)
        assert sniffer.stdout is not None
        assert sniffer.stdout.readline() == b"ready\n"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        nodes = []
        for name in NODES:
            settings = [
                f"cluster.node={name}",
                "cluster.places=1",
                "cluster.min_nodes=2",
                "cluster.tls=false",
                "checkpoint.every_steps=1000",
                *_settings(network, name, in_tunnel),
            ]
            words = [word for each in settings for word in ("--set", each)]
            command = [sys.executable, "-m", "holdfast", "run", str(script), "--workers", "2"]
            command += ["--folder", str(folder / "run"), *words]
            log = stack.enter_context((folder / f"{name}.log").open("w"))
            nodes.append(
                subprocess.Popen(
                    [*network.command(name), *command, "--", str(steps), str(width), str(dumps)],
                    stdout=log,
                    stderr=log,
                )
            )
        codes = [node.wait() for node in nodes]
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        tunnel_cpu_s = sum(_cpu_seconds(process.pid) for process in tunnel)
    if any(codes):
        last = [(folder / f"{name}.log").read_text().strip()[-300:] for name in NODES]
        raise SystemExit(f"the nodes ended with {codes}: {last}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    events = read_events(folder / "run")
    by_step = {each.step: each for _, each in events if isinstance(each, StepDone)}
    seconds = sorted(each.seconds for each in by_step.values())
    dumped = b"".join(path.read_bytes() for path in sorted(dumps.iterdir()))
    return Found(
        tuple(by_step[step].loss for step in sorted(by_step)),
        seconds[len(seconds) // 2],
        cpu_s,
        tunnel_cpu_s,
        np.fromfile(kept, np.uint8),
        _windows(np.frombuffer(dumped, np.uint8)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    for tool in ("wg", "wireguard-go"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is missing: apt install wireguard-go wireguard-tools")
    with tempfile.TemporaryDirectory(prefix="hf-tunnel-") as root, Network() as network:
        network.up(NODES)
        bare, hidden = (
            train(network, Path(root, way), options.steps, options.width, way == "tunnel")
            for way in ("bare", "tunnel")
        )
        shown = seen(bare.gradients, bare.captured)
        through = seen(shown, hidden.captured)
    for name, each, number in (("bare", bare, len(shown)), ("tunnel", hidden, len(through))):
        print(
            f"{name}: {len(each.captured) / 1e6:.1f} MB on the line; {number * WINDOW:,} of "
            f"{len(each.gradients) * WINDOW:,} bytes of gradients seen; {each.step_s:.3f} s a step;"
            f" CPU {each.cpu_s:.1f} s, of the tunnel {each.tunnel_cpu_s:.1f} s"
        )
    is_equal = bare.losses == hidden.losses
    print(f"losses of {len(bare.losses)} steps are {'equal' if is_equal else 'NOT equal'}")
    print(f"step time through the tunnel: {hidden.step_s / bare.step_s:.2f} x")
    return 0 if len(shown) * WINDOW >= ASKED and not len(through) and is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
