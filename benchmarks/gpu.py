"""Tokens a second and utilisation of one accelerator, from a real run.

    python -m benchmarks.gpu                              examples/llama3.2-1b/run.yaml
    python -m benchmarks.gpu train.microbatch_size=8      with other values of the run file
    python -m benchmarks.gpu --run-file examples/quickstart/run.yaml device=cpu     does it run?

It is `holdfast train` as a user would type it, with agent, loader, ledger, reports and the last
checkpoint. It runs in a temporary folder, and is asked to leave after ten minutes. Figures come
from the run's journal. Steps before `--skip` compile and warm up and are left out. The other steps
count without the seconds of a capture, which have a line of their own. Tokens are those computed
on: samples times sequence length. Utilisation has two conventions, both named.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paired import Estimate, estimate
from holdfast.config.load import load_config
from holdfast.config.run import RunConfig
from holdfast.core.flops import CONVENTIONS, utilisation
from holdfast.events import CheckpointCaptured, Event, StepDone
from holdfast.plan.hardware import Accelerator, detect_hardware
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore

ROOT = Path(__file__).resolve().parent.parent
BAR = 42_000  # tokens/s of Llama 3.2 1B at sequence 4096 on one H100


@dataclass(frozen=True)
class Speed:
    """tokens_per_second: median over the steps that count, with its interval. phases: mean
    seconds of each phase of such a step."""

    steps: int
    tokens_per_second: Estimate
    phases: dict[str, float]


def speed(events: Sequence[Event], sequence: int, skip: int) -> Speed:
    """Raises SystemExit when no step is left after the first `skip`."""
    counted = [e for e in events if isinstance(e, StepDone) and e.step > skip]
    if not counted:
        sys.exit(f"the run ended before step {skip + 1}: nothing was measured")
    rates = [
        e.samples * sequence / (sum(e.phases.values()) - e.phases.get("capture", 0.0))
        for e in counted
    ]
    names = dict.fromkeys(name for e in counted for name in e.phases)
    phases = {n: statistics.fmean(e.phases.get(n, 0.0) for e in counted) for n in names}
    return Speed(len(counted), estimate(rates), phases)


def train(run_file: Path, overrides: Sequence[str], seconds: float) -> int:
    """`holdfast train` with a deadline; its exit code."""
    command = [sys.executable, "-m", "holdfast.cli.main", "train", str(run_file), *overrides]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # saves and leaves
        try:
            return process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def show(found: Speed, config: RunConfig, device: Accelerator | None, events: list[Event]) -> None:
    rate = found.tokens_per_second
    print(
        f"\n{config.model.preset}, {config.train.precision}, compile {config.train.compile}, "
        f"{config.train.microbatch_size} x {config.data.sequence_length} tokens a microbatch, "
        f"{config.train.batch_size} samples a step, "
        f"on {device.name if device else 'a CPU'}"
    )
    print(
        f"tokens/s     {rate.median:,.0f} [{rate.low:,.0f}, {rate.high:,.0f}], "
        f"median of {found.steps} steps"
    )
    peak = device.peak_flops(config.train.precision) if device else None
    if peak is None:
        print("utilisation  the peak of this device is not known")
    else:
        for name, formula in CONVENTIONS.items():
            share = utilisation(rate.median, config.model, config.data.sequence_length, peak, name)
            of = f"{100 * share:.1f} % of {peak / 1e12:.0f} TFLOP/s"
            print(f"utilisation  {of}, {name}: {formula}")
    print("a step       " + ", ".join(f"{n} {1e3 * s:.1f} ms" for n, s in found.phases.items()))
    for event in events:
        if isinstance(event, CheckpointCaptured):
            print(
                f"capture      {event.bytes / 1e9:.1f} GB in {event.seconds:.2f} s "
                f"(step {event.step})"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run-file", type=Path, default=ROOT / "examples/llama3.2-1b/run.yaml")
    parser.add_argument("--skip", type=int, default=10, help="steps that are left out")
    parser.add_argument("--seconds", type=float, default=540.0, help="deadline of the run")
    parser.add_argument("--bar", type=float, default=BAR, help="tokens/s to pass; 0: none")
    parser.add_argument("overrides", nargs="*", help="key=value of the run file")
    settings = parser.parse_args()
    given = load_config(settings.run_file, settings.overrides).config
    found = detect_hardware().accelerators
    if not found and given.device != "cpu":
        print("there is no accelerator here; with device=cpu it runs, without a verdict")
        return 2
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="holdfast-gpu-") as folder:
        places = [f"folder={folder}/run", f"data.folder={folder}/dataset"]
        code = train(settings.run_file, [*settings.overrides, *places], settings.seconds)
        events = [record.event for record in read_journal(FolderStore(Path(folder) / "run"))]
    result = speed(events, given.data.sequence_length, settings.skip)
    device = None if given.device == "cpu" else found[0]
    show(result, given, device, events)
    print(f"all of it    {time.monotonic() - begun:.0f} s")
    if device is None or not settings.bar:
        return code
    passed = result.tokens_per_second.median >= settings.bar
    print(f"bar          {settings.bar:,.0f} tokens/s: {'passed' if passed else 'MISSED'}")
    return code or int(not passed)


if __name__ == "__main__":
    sys.exit(main())
