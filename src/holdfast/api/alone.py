"""An own loop in one process, without a run folder: `python train.py`, a notebook, `--debug`.

The script stays in the thread that called it, so that a debugger, a profiler and a notebook see it.
The engine is the one of a run with one worker, in a thread of its own, which takes turns with the
script (`tasks/scripts/own_loop.py`). Nothing is saved: the same command begins again.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.config.loading.load import LoadedConfig, load_config
from holdfast.config.sections.task import SCRIPT_TASK
from holdfast.errors import TaskError

if TYPE_CHECKING:
    from holdfast.tasks.script import Script
    from holdfast.tasks.scripts.own_loop import Run

_SAY_EVERY_S = 1.0  # Seconds between two lines of steps
_GIVEN = ("file", "command line")  # kinds of origins
_USED = ("train.", "task.", "seed", "device", "name", "layout.workers")  # keys of a run file
_MEETING_S = 60.0  # for a group of one process


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run() -> Run:
    """Return the run that this script takes part in. Without one, the script trains alone.

    Raises TaskError if this process is one of several, which would each train alone."""
    from holdfast.tasks.scripts.own_loop import current_run

    found = current_run()
    if found is None or found.is_over:
        _refuse_one_of_several(os.environ)
        file = getattr(sys.modules["__main__"], "__file__", None) or "notebook"
        found = begin_alone(Path(file), sys.argv[1:], None, ()).run
    return found


def debug(script: Path, arguments: Sequence[str], run_file: Path | None, given: list[str]) -> None:
    """Run a script alone, in this thread. Raises ScriptError with its line."""
    begun = begin_alone(script, arguments, run_file, given)
    try:
        begun.execute()
    except Exception as error:
        raise begun.error_of(error) from error


def begin_alone(
    file: Path, arguments: Sequence[str], run_file: Path | None, given: Sequence[str]
) -> Script:
    """Return a script whose engine waits for its loop. Raises UserError."""
    from holdfast.launch.run.task_run import refuse_keys_of_the_script
    from holdfast.launch.start.facts import Facts
    from holdfast.launch.start.machine import plan_for_machine
    from holdfast.machine.hardware import detect_hardware
    from holdfast.tasks.script import Script

    fixed = (f"task.name={SCRIPT_TASK}", f"task.folder={file.resolve().parent}", "layout.workers=1")
    loaded = load_config(run_file, [*given, *fixed])
    loaded = plan_for_machine(loaded, Facts(detect_hardware()))
    refuse_keys_of_the_script(loaded)
    written = [key for key, origin in loaded.origins.items() if origin.kind in _GIVEN]
    script = Script(file.name, arguments)
    script.enter_alone(loaded.config)
    say(f"{file.name} trains alone, and saves nothing; a run is: holdfast run {file.name}")
    if unused := [key for key in written if not key.startswith(_USED)]:
        say(f"not used by a script that trains alone: {', '.join(unused)}")
    is_ending = threading.Event()
    parts = (script, loaded, is_ending)
    engine = threading.Thread(target=_serve, args=parts, name="engine", daemon=True)
    atexit.register(_join_if, is_ending, engine)
    engine.start()
    return script


def _join_if(is_ending: threading.Event, engine: threading.Thread) -> None:
    """Python ends a daemon thread wherever it is. In C++ of torch that aborts the process."""
    if is_ending.is_set():
        engine.join()


def _refuse_one_of_several(environment: Mapping[str, str]) -> None:
    size = environment.get("WORLD_SIZE", "1")
    if size.isdigit() and int(size) > 1:
        raise TaskError(
            f"this process is one of {size} (WORLD_SIZE), and each would train a model of its own",
            where="holdfast.run",
            remedy=f"start the script once, by: holdfast run SCRIPT --workers {size}",
        )


def _serve(script: Script, loaded: LoadedConfig, is_ending: threading.Event) -> None:
    """Train what the script keeps; the script gets what goes wrong. is_ending: set when this thread
    waits for the script no more."""
    try:
        script.turns.wait()
        _train(script, loaded)
    except BaseException as error:
        is_ending.set()
        script.turns.fail(error)
    else:
        is_ending.set()
        script.turns.end()


def _train(script: Script, loaded: LoadedConfig) -> None:
    from holdfast.layout import Layout, place_replicas
    from holdfast.parallel.axes.process_groups import connect
    from holdfast.parallel.torch_compat import memory_store
    from holdfast.tasks.child import describe_task
    from holdfast.tasks.scripts.script_engine import ScriptEngineTask
    from holdfast.training.engine.build import build_engine, connect_settings, make_session

    for line in script.run.notes:
        say(line)
    found = describe_task(loaded.config, script)
    values = {f"task.{key}": found[key] for key in ("data", "samples", "validation", "parameters")}
    wanted = found["train"].items()
    values |= {k: v for k, v in wanted if loaded.origins[k].kind not in _GIVEN}
    config = loaded.with_planned(values, "given by the script").config
    device, task = script.run.device, ScriptEngineTask(script, config)
    settings = connect_settings(config, memory_store(), device, _MEETING_S)
    groups = connect(settings, place_replicas([Layout()], 1, ("alone",)), 0)
    engine = build_engine(config, groups, device, task=task)
    engine.initialise(config.seed)
    session = make_session(config, engine, task.open_batches(""), device, task)
    every, last, said_at = config.train.evaluate.every, config.train.steps, 0.0
    with session.loader(0) as feed:
        for share in feed:
            engine.begin(share.step)
            engine.compute(share.microbatches)
            verdict = engine.reduce()
            engine.apply(verdict)
            if share.step == last or time.monotonic() - said_at > _SAY_EVERY_S:
                said_at = time.monotonic()
                say(f"step {share.step:,} of {last:,}: loss {verdict.mean_loss:.4f}")
            is_due = share.step == last or (every and share.step % every == 0)
            if is_due and (validated := session.evaluator.run()):
                say(f"step {share.step:,}: validation loss {validated.loss:.4f}")
            if share.step == last:
                break
    session.close()
