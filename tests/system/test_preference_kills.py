"""Preference runs under random kills: the bits of an undisturbed run, whatever dies.

One worker trains undisturbed. A second run of the same file has 1, then 3, then 2 replicas, and a
dataset of its own. So it computes its own reference log-probabilities. A role is drawn for each
fault: a worker, the mover, the fork server or the agent gets SIGKILL. After an agent's death the
same command continues. `HOLDFAST_FAULTS` is the number of faults of each run.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.events import Evaluated, ReferenceProgress, StepDone
from holdfast.wire.journal import JournalTail, read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.data.test_preferences import pairs
from tests.support.chat import tokenizer_folder, write_rows
from tests.support.checkpoints import newest_tensors
from tests.support.commands import Outcome, apart, start, within
from tests.support.ranks import wait_until

FAULTS = int(os.environ.get("HOLDFAST_FAULTS", "50"))
REPLICAS = (1, 3, 2)
ROLES = ("worker", "worker", "mover", "fork server", "agent")
DEADLINE = 240.0  # seconds for a step on a busy machine
STEPS_OF_A_FAULT = 64  # a quiet machine does most of them while a lost process comes back
RUN_FILE = """\
name: preferred
folder: {root}/run
seed: 5
device: cpu
data:
  folder: {root}/dataset
  sources:
    - {{kind: jsonl, path: "{root}/rows.jsonl", rows: preference}}
  attention: document
  sequence_length: 200
  validation_fraction: 0.1
  processes: 1
model: {{from: "{root}/model"}}
objective: {{kind: {kind}}}
train:
  steps: {steps}
  batch_size: 6
  microbatch_size: 1
  evaluate: {{every: 10, samples: 4}}
  optimizer: {{learning_rate: 0.001, clip_norm: 0.05}}
layout: {{workers: 1}}
checkpoint: {{every_steps: 5}}
cluster: {{threads_per_worker: 1}}
"""


def run_file(root: Path, kind: str, steps: int) -> Path:
    """A tiny Llama with random weights in Hugging Face form, pairs, and a run file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer_folder(root / "model")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=2,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(root / "model")
    write_rows(root / "rows.jsonl", pairs(80))
    path = root / "run.yaml"
    path.write_text(RUN_FILE.format(root=root, kind=kind, steps=steps))
    return path


class Attacked:
    """A run that is killed part by part, and continued."""

    def __init__(self, path: Path, folder: Path, dataset: Path, chooser: random.Random):
        self._command = ("train", path, f"folder={folder}", f"data.folder={dataset}")
        self.folder, self.chooser = folder, chooser
        self.counts: Counter[str] = Counter()
        self.ended = 0  # starts of the command
        self.replicas = REPLICAS[0]
        self._log = folder.with_name("killed.log")  # a pipe that is not read would fill
        self._tail = JournalTail(FolderStore(folder))
        self._newest_step = 0
        self._has_reference = False
        self.start()

    def start(self) -> None:
        words: list[str | Path] = [*self._command, f"layout.workers={self.replicas}"]
        with self._log.open("ab") as log:
            self.process = start(*words, output=log)
        self.ended += 1

    def events(self) -> Iterator[Any]:
        if self.folder.exists():
            for record in read_journal(FolderStore(self.folder)):
                yield record.event

    def _read_new(self) -> None:
        for record in self._tail.read_new() if self.folder.exists() else ():
            if isinstance(record.event, StepDone):
                self._newest_step = max(self._newest_step, record.event.step)
            self._has_reference |= isinstance(record.event, ReferenceProgress)

    def newest_step(self) -> int:
        self._read_new()
        return self._newest_step

    def has_begun(self) -> bool:
        """Whether the reference or a step was seen."""
        self._read_new()
        return self._has_reference or self._newest_step > 0

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def wait_for_step(self, step: int) -> bool:
        """Until the step is done, or the run has ended."""
        wait_until(
            lambda: self.is_over() or self.newest_step() >= step,
            DEADLINE,
            lambda: self.describe(f"step {step}"),
        )
        return not self.is_over()

    def kill(self, role: str) -> None:
        """SIGKILL a process of a role. After an agent's death the run is continued."""
        if role == "agent":
            self.process.kill()
            self.process.wait()
            self.counts[role] += 1
            self.start()
            return
        if role == "fork server" and not self.processes(role):
            role = "worker"  # a new fork server starts when one is needed: for a worker, say
        wait_until(
            lambda: self.is_over() or self.processes(role),
            DEADLINE,
            lambda: self.describe(f"a {role}"),
        )
        if not (there := self.processes(role)):
            return  # the run has ended
        with suppress(psutil.NoSuchProcess):
            self.chooser.choice(there).send_signal(signal.SIGKILL)
            self.counts[role] += 1

    def describe(self, what: str) -> str:
        """What the test waited for, the processes, and the newest events of the run."""
        lines = [what, f"faults: {dict(self.counts)}, replicas: {self.replicas}"]
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                lines.append(f"{child.pid} {child.ppid()} {child.status()} {child.cmdline()}")
        lines += [str(event) for event in list(self.events())[-30:]]
        lines.append(self._log.read_text()[-4000:])
        return "\n".join(lines)

    def processes(self, role: str) -> list[psutil.Process]:
        """Those of a role that is no agent, by what they call themselves. A worker whose fork
        server was killed is a child of the agent."""
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            return [child for child in children if _is(child, role)]
        return []

    def resize(self, replicas: int) -> None:
        """Ask the run to leave, and continue it with another number of replicas."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(DEADLINE)
        self.replicas = replicas
        self.start()

    def end(self) -> Outcome:
        code = self.process.wait(DEADLINE)
        return Outcome(code, "", self._log.read_text()[-4000:])


def _is(process: psutil.Process, role: str) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline()).startswith(f"holdfast: {role} ")
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_random_kills_change_no_bit(tmp_path: Path, kind: str) -> None:
    steps = 20 + STEPS_OF_A_FAULT * FAULTS
    path = run_file(tmp_path, kind, steps)
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    apart("train", path, f"folder={alone}", deadline=3000).succeeds()

    chooser = random.Random(20261128)
    run = Attacked(path, killed, tmp_path / "dataset of the killed", chooser)
    try:
        # The first fault meets the reference, the rest meets steps.
        wait_until(lambda: run.is_over() or run.has_begun(), DEADLINE, "the first work")
        run.kill("worker")
        roles: list[str] = []
        for fault in range(1, FAULTS):
            roles = roles or chooser.sample(ROLES, len(ROLES))
            place = fault * len(REPLICAS) // FAULTS
            if REPLICAS[place] != run.replicas:
                run.resize(REPLICAS[place])
            if not run.wait_for_step(run.newest_step() + chooser.randint(1, 4)):
                break
            run.kill(roles.pop())
        ended = run.end()
    finally:
        run.process.kill()
    assert ended.code == 0, ended.err
    assert sum(run.counts.values()) >= FAULTS - 1, "the run ended before its last fault"
    assert newest_tensors(alone, steps) == newest_tensors(killed, steps)
    assert curve(alone) == curve(killed)
    audit = within("data", "audit", killed).succeeds()
    assert f"{6 * steps:,} samples in {steps:,} steps: none missing, none twice" in audit.out
    digests = [{e.digest for e in references(f) if e.digest} for f in (alone, killed)]
    assert digests[0] == digests[1]
    assert len(digests[0]) == (kind == "dpo")
    print(f"{kind}: {dict(run.counts)}, {run.ended} starts, {steps} steps")


def references(folder: Path) -> list[ReferenceProgress]:
    events = (record.event for record in read_journal(FolderStore(folder)))
    return [event for event in events if isinstance(event, ReferenceProgress)]


def curve(folder: Path) -> dict[tuple[str, int], tuple[float, dict[str, float]]]:
    """Loss and metrics of each step and evaluation; repeated steps must have given the same."""
    found: dict[tuple[str, int], tuple[float, dict[str, float]]] = {}
    for record in read_journal(FolderStore(folder)):
        event = record.event
        if isinstance(event, StepDone | Evaluated):
            said = event.loss, dict(event.metrics)
            assert found.setdefault((type(event).__name__, event.step), said) == said
    return dict(sorted(found.items()))
