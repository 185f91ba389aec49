"""A trial of Ray Tune that is a run of Holdfast.

    from holdfast_platform.search.ray_tune import trainable
    tune.Tuner(trainable(), param_space={"run_file": ..., "folder": ..., "keys": {...}})

One result of Ray is one validation. The run saves its own state, so Ray's checkpoint of a trial
only notes where the run lies. Ray may start a trial again anywhere: it resumes that run.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.config.loading.load import load_config
from holdfast.errors import ConfigError, HoldfastError
from holdfast.wire.child_command import module_command
from holdfast_platform.pipeline.children import Children, shell_code
from holdfast_platform.pipeline.stages import LEFT_CODE
from holdfast_platform.pipeline.state import locked
from holdfast_platform.search.file import overrides_of
from holdfast_platform.search.runner import MAX_STARTS_WITHOUT_PROGRESS, STOPS_ALL
from holdfast_platform.search.trial import evaluations

NOTE = "holdfast.json"
LOOK_S = 0.5
KEYS = ("run_file", "folder", "keys")


class TrialRun:
    """The run of one trial: its process, and the validations that were reported."""

    def __init__(self, config: Mapping[str, Any], trial: str) -> None:
        """Raises ConfigError. config: run_file, folder (of all trials), keys (of the run file)."""
        if set(config) != set(KEYS):
            raise ConfigError(
                f"a trial has the keys {', '.join(config)}",
                where="param_space",
                remedy=f"give {', '.join(KEYS)}; keys of the run file go into keys",
            )
        self._file, self._values = Path(config["run_file"]), dict(config["keys"])
        self._place = Path(config["folder"]).absolute() / trial
        self._run = self._place / "run"
        self._steps = load_config(self._file, overrides_of(self._values)).config.train.steps
        self._children = Children()
        self._process: subprocess.Popen[bytes] | None = None
        self._reported = 0  # step of the newest validation that Ray has

    def next_validation(self) -> dict[str, Any]:
        """Train until there is a validation that Ray has not; return its numbers. Raises
        HoldfastError if the run does not get on."""
        vain_starts = 0
        while True:
            by_step = evaluations(self._run, "loss")
            left = [step for step in by_step if step > self._reported]
            if left:
                step = min(left)
                self._reported = step
                is_over = step >= self._steps and self._end_of(self._process) is not None
                return {"loss": by_step[step], "train_step": step, "done": is_over}
            code = None if self._process is None else self._process.poll()
            if self._process is None or code is not None:
                if code is not None and shell_code(code) in STOPS_ALL:
                    vain_starts = MAX_STARTS_WITHOUT_PROGRESS
                if vain_starts >= MAX_STARTS_WITHOUT_PROGRESS:
                    raise HoldfastError(
                        f"the run in {self._run} does not get on; see {self._place / 'log'}"
                    )
                vain_starts += code is not None
                self._start()
            time.sleep(LOOK_S)

    def _end_of(self, process: subprocess.Popen[bytes] | None) -> int | None:
        """Wait until a run that has done its last step has saved it."""
        return 0 if process is None else process.wait()

    def _start(self) -> None:
        own = {**self._values, "folder": str(self._run), "cluster.left_exit_code": LEFT_CODE}
        words = module_command("holdfast.cli.main", "train", str(self._file), *overrides_of(own))
        # A process of the trial that Ray has lost may still be at work on this machine.
        with locked(self._place, lambda line: None, lambda: False) as lock:
            assert lock is not None
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
        raise ConfigError(
            "Ray Tune is not installed", where="ray", remedy="pip install 'holdfast[tune]'"
        ) from None

    class HoldfastTrainable(tune.Trainable):  # type: ignore[misc]
        """A trial of Ray Tune."""

        def setup(self, config: dict[str, Any]) -> None:
            self.trial_run = TrialRun(config, self.trial_id)

        def step(self) -> dict[str, Any]:
            return self.trial_run.next_validation()

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            self.trial_run.save(checkpoint_dir)

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            self.trial_run.load(checkpoint_dir)

        def cleanup(self) -> None:
            self.trial_run.stop()

    return HoldfastTrainable
