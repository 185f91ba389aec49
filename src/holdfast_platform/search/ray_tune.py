"""A trial of Ray Tune that is a run of Holdfast.

    from holdfast_platform.search.ray_tune import trainable
    tune.Tuner(trainable(), param_space={"run_file": ..., "folder": ..., "keys": {...}})

One result of Ray is one validation. The run saves its own state, so Ray's checkpoint of a trial
only notes where the run lies. If Ray starts a trial again, the trial resumes that run.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError, HoldfastError
from holdfast_platform.pipeline.children import Children, shell_code
from holdfast_platform.pipeline.stages import NO_RETRY
from holdfast_platform.pipeline.state import locked
from holdfast_platform.search.file import Search
from holdfast_platform.search.runner import MAX_STARTS_WITHOUT_PROGRESS
from holdfast_platform.search.trial import evaluations, train_words

NOTE = "holdfast.json"
LOOK_S = 0.5
KEYS = {"run_file", "folder", "keys"}


class TrialRun:
    """The run of one trial: its process, and the validations that were reported."""

    def __init__(self, config: Mapping[str, Any], trial: str) -> None:
        """Raises ConfigError. config: run_file, folder (of all trials), keys (of the run file)."""
        if set(config) != KEYS:
            raise ConfigError(
                f"a trial has the keys {', '.join(config)}",
                where="param_space",
                remedy="give run_file, folder and keys; keys of the run file go into keys",
            )
        self._search = Search(run=str(config["run_file"]), set=config["keys"], space={"seed": (1,)})
        self._place = Path(config["folder"]).absolute() / trial
        self._run = self._place / "run"
        self._children = Children()
        self._process: subprocess.Popen[bytes] | None = None
        self._reported = 0  # step of the newest validation that Ray has

    def next_validation(self) -> dict[str, Any]:
        """Train until there is a validation that Ray has not; return its numbers. Raises
        HoldfastError if the run does not get on."""
        vain_starts = 0
        while True:
            by_step = evaluations(self._run, "loss")
            if left := [step for step in by_step if step > self._reported]:
                self._reported = step = min(left)
                is_last = step >= self._search.steps
                if is_last and self._process is not None:
                    self._process.wait()  # it saves its last state
                return {"loss": by_step[step], "train_step": step, "done": is_last}
            code = None if self._process is None else self._process.poll()
            if self._process is None or code is not None:
                is_refused = code is not None and shell_code(code) in NO_RETRY
                if is_refused or vain_starts >= MAX_STARTS_WITHOUT_PROGRESS:
                    log = self._place / "log"
                    raise HoldfastError(f"the run in {self._run} does not get on; see {log}")
                vain_starts += code is not None
                self._start()
            time.sleep(LOOK_S)

    def _start(self) -> None:
        words = train_words(self._search, self._run, {})
        # A process of the trial that Ray has lost may still be at work on this machine.
        with locked(self._place, lambda line: None, lambda: False) as lock:
            assert lock is not None, "nothing ends the wait"
            log = self._place / "log"
            self._process = self._children.start(words, lock, self._place, log)

    def save(self, folder: str) -> None:
        """Note where the run lies."""
        note = {"run": str(self._run), "reported": self._reported}
        Path(folder, NOTE).write_text(json.dumps(note), "utf-8")

    def load(self, folder: str) -> None:
        """Continue after the validations that a note counts. Raises ConfigError for a note of
        another trial, as Population Based Training copies them."""
        note = json.loads(Path(folder, NOTE).read_text("utf-8"))
        if note["run"] != str(self._run):
            raise ConfigError(
                f"this trial is to continue the run {note['run']} of another one",
                where="Ray Tune",
                remedy="use a scheduler that copies no checkpoints, such as ASHA",
            )
        self._reported = int(note["reported"])

    def stop(self) -> None:
        """Ask the run to save and leave, and wait for it."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def trainable() -> Any:
    """Return the class for `ray.tune.Tuner`. Raises ConfigError without Ray."""
    try:
        from ray import tune
    except ImportError:
        remedy = "pip install 'holdfast[tune]'"
        raise ConfigError("Ray Tune is not installed", where="ray", remedy=remedy) from None

    class HoldfastTrainable(tune.Trainable):  # type: ignore[misc]
        """A trial of Ray Tune."""

        def setup(self, config: dict[str, Any]) -> None:
            self.trial_run = TrialRun(config, self.trial_id)
            self.step, self.cleanup = self.trial_run.next_validation, self.trial_run.stop
            self.save_checkpoint, self.load_checkpoint = self.trial_run.save, self.trial_run.load

    return HoldfastTrainable
