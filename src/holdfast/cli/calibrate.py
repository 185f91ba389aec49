"""`holdfast calibrate`: measures the devices and links of this machine, for the planner."""

from __future__ import annotations

import json as json_module
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from holdfast.api.early_end import early_signals_answered
from holdfast.api.progress import StageProgress
from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json
from holdfast.config.sections.cluster import LOOPBACK_DEVICE
from holdfast.core.devices import DeviceKind, device_kind
from holdfast.errors import UserError
from holdfast.machine.hardware import detect_hardware
from holdfast.plan.hardware.calibration import (
    Calibration,
    calibration_path,
    read_calibration,
    write_calibration,
)
from holdfast.plan.hardware.devices import device_reported, load_devices
from holdfast.plan.hardware.fit import (
    FittedSample,
    Sample,
    compare,
    fit_calibration,
    mean_error,
    samples_from_json,
)
from holdfast.plan.probing.step_fit import compare_steps, with_steps
from holdfast.show.output import print_json, print_table, say
from holdfast.wire.child_command import module_command

RANK_MODULE = "holdfast.training.measure.measure_machine"
START_S = 10  # Of --seconds, what processes need to start: importing torch
LEAST_S = 1
MOST_RANKS = 2

app = make_app("Measure this machine's devices and links, for the planner.")


@app.command()
def calibrate(
    seconds: Annotated[float, typer.Option(min=5, max=3600, help="in all, about")] = 50,
    write: Annotated[
        Path | None, typer.Option(help="a file in place of the one that plans of this machine read")
    ] = None,
    json: Json = False,
) -> None:
    """Measure products, kernels, messages and steps of small models; fit the planner's constants.

    Two processes measure at the same time, as the workers of a run compute. Plans for this machine
    use the result in place of the table's numbers. A call that is interrupted changes nothing.

    \b
    Example:
      holdfast calibrate --seconds 50
    """
    hardware = detect_hardware()
    cards = hardware.accelerators
    kind = device_kind(cards[0].kind if cards else "cpu")
    known = None
    name = "cpu"
    if cards:
        known = device_reported(cards[0].name, cards[0].memory_bytes, load_devices())
        name = known.name if known else cards[0].name
    path = write or calibration_path(hardware.node)
    ranks = min(MOST_RANKS, len(cards)) if cards else MOST_RANKS
    measuring = max(LEAST_S, seconds - START_S)
    try:
        with early_signals_answered(), StageProgress() as progress:
            torch, samples = _measure(kind, ranks, measuring, progress)
    except BaseException:
        _say_what_stays(path)
        raise
    today = date.today().isoformat()
    found = fit_calibration(samples, known, today, hardware.node, name, torch)
    in_steps = list[FittedSample]()
    of_table = load_devices().get(name)
    if of_table is not None:
        found = with_steps(found, of_table)
        in_steps = compare_steps(samples, found, of_table)
    write_calibration(found, path)
    compared = compare(samples, found) + in_steps
    if json:
        print_json(found.to_json() | {"file": str(path), "errors": _errors(compared)})
        return
    rows = []
    for each in compared:
        one = each.sample
        if one.name:
            rows.append((one.kind, one.name, *_times(each), ""))
            continue
        size = f"{one.flops / 1e9:.3g} GFLOP" if one.flops else _bytes(one.size)
        rate = one.flops / one.seconds if one.flops else one.size / one.seconds
        rows.append(
            (
                f"{one.kind} {one.precision}".strip(),
                size,
                *_times(each),
                f"{rate / 1e9:.3g} {'GFLOP/s' if one.flops else 'GB/s'}",
            )
        )
    print_table(rows, ("what", "size", "measured us", "fitted us", "error", "measured rate"))
    _print_constants(found, compared)
    say(f"written to {path}")


def _say_what_stays(path: Path) -> None:
    """After an interruption: what plans use from now on."""
    try:
        earlier = read_calibration(path)
    except UserError:
        return
    if earlier is not None:
        say(f"nothing has changed: {path} is that of {earlier.date}")
    else:
        say("nothing is written: plans use the table of devices")


def _measure(
    kind: DeviceKind, ranks: int, seconds: float, progress: StageProgress
) -> tuple[str, list[Sample]]:
    """(torch's version, samples) of the measuring processes."""
    with tempfile.TemporaryDirectory() as folder, _started(kind, ranks, seconds, folder) as output:
        head: dict[str, Any] = {}
        found: list[dict[str, Any]] = []
        for line in output:
            value = json_module.loads(line)
            if not head:
                head = value
                continue
            found.append(value)
            progress.show("operations", len(found), head["operations"])
        if not head or len(found) < head["operations"]:
            words = (Path(folder) / "stderr").read_text("utf-8", "replace").strip().splitlines()
            raise UserError(
                f"measuring on {kind.name} ended early ({words[-1] if words else 'no message'})",
                where="holdfast calibrate",
                remedy="see what this machine lacks with: holdfast doctor",
            )
    return str(head["torch"]), samples_from_json(found)


@contextmanager
def _started(kind: DeviceKind, ranks: int, seconds: float, folder: str) -> Iterator[IO[str]]:
    """The ranks as processes, which end with the block; what rank 0 prints."""
    settings = {"OMP_NUM_THREADS": "1", **kind.settings}
    if kind.is_host and sys.platform == "linux":
        settings["GLOO_SOCKET_IFNAME"] = LOOPBACK_DEVICE
    processes: list[subprocess.Popen[str]] = []
    errors = (Path(folder) / "stderr").open("w")
    try:
        for rank in reversed(range(ranks)):
            words = (str(rank), str(ranks), folder, str(seconds), kind.name)
            processes.append(
                subprocess.Popen(
                    module_command(RANK_MODULE, *words),
                    env=os.environ | settings,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=errors,
                    text=True,
                    start_new_session=True,  # Ctrl-C is answered here
                )
            )
        output = processes[-1].stdout
        assert output is not None
        yield output
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        errors.close()


def _times(found: FittedSample) -> tuple[str, str, str]:
    measured, fitted = found.sample.seconds, found.fitted_s
    return f"{measured * 1e6:.1f}", f"{fitted * 1e6:.1f}", f"{found.error:+.0%}"


def _bytes(size: float) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:.0f} B"


def _print_constants(found: Calibration, compared: list[FittedSample]) -> None:
    print()
    errors = _errors(compared)
    rows = [
        (
            f"{found.device} {precision}",
            f"{found.flops[precision] * each.compute / 1e9:.4g} GFLOP/s, ramp "
            f"{each.ramp_s * 1e6:.2g} us, memory {found.bandwidth * each.memory / 1e9:.3g} GB/s, "
            f"launch {each.launch_s * 1e6:.2g} us",
            f"{errors[f'product {precision}']:.1%}",
        )
        for precision, each in found.efficiency.items()
    ]
    names = {"allreduce": found.inside, "message": found.messages, "host": found.host}
    rows += [
        (
            kind,
            f"{link.latency_s * 1e6:.3g} us, {link.bandwidth / 1e9:.3g} GB/s, ramp {link.ramp:.2f}",
            f"{errors[kind]:.1%}",
        )
        for kind, link in names.items()
        if link is not None and kind in errors
    ]
    if "step" in errors:
        steps = found.steps
        words = (
            f"kernel {steps.kernel_s * 1e6:.3g} us, microbatch {steps.microbatch_s * 1e3:.2g} ms, "
            f"step {steps.step_s * 1e3:.2g} ms, products x {steps.products:.2f}, "
            f"moves x {steps.moves:.2f}, gradients x {steps.gradient_moves:.1f}"
        )
        rows.append(("step", words, f"{errors['step']:.1%}"))
    rows += [
        (way, f"{link.latency_s * 1e6:.3g} us, {link.bandwidth / 1e9:.3g} GB/s", "")
        for way, link in found.ways
    ]
    print_table(rows, ("fitted", "constants", "mean error"))


def _errors(compared: list[FittedSample]) -> dict[str, Any]:
    """Mean absolute error by kind and precision."""
    kinds = dict.fromkeys(f"{e.sample.kind} {e.sample.precision}".strip() for e in compared)
    return {
        kind: mean_error(
            [e for e in compared if f"{e.sample.kind} {e.sample.precision}".strip() == kind]
        )
        for kind in kinds
    }
