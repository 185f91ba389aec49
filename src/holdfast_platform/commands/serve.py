"""`holdfast serve`: one or two models behind a small server of the OpenAI protocol."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import RunArgument, refuse_beside, run_path
from holdfast.errors import ConfigError
from holdfast.show.output import say
from holdfast.wire.store.publish import replace_file

if TYPE_CHECKING:
    from holdfast_platform.serve.arms import Drift
    from holdfast_platform.serve.server import ServedModel

app = make_app("Answer requests of the OpenAI protocol.")


@app.command()
def serve(
    model: RunArgument,
    canary: Annotated[
        str | None, typer.Option(help="a second run or folder, for a share of the requests")
    ] = None,
    share: Annotated[float, typer.Option(help="of requests for the second model")] = 0.05,
    ab: Annotated[
        bool, typer.Option("--ab", help="compare the two; the second one is never stopped")
    ] = False,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, help="0: any free one")] = 8000,
    slots: Annotated[int, typer.Option(min=1, help="replies that a model writes at a time")] = 8,
    key_variable: Annotated[
        str | None, typer.Option(help="environment variable with the key of requests")
    ] = None,
    drift: Annotated[
        Path | None, typer.Option(help="file of rows like those that prompts should resemble")
    ] = None,
    on_drift: Annotated[
        str | None, typer.Option(help="shell command on drift; HOLDFAST_DRIFT names the finding")
    ] = None,
    finding: Annotated[Path, typer.Option(help="file that drift is written to")] = Path(
        "retrain.json"
    ),
) -> None:
    """Serve a run's newest checkpoint, or a model's folder, on the CPU until Ctrl-C.

    It is for tests and demonstrations. For more, export the run and use vLLM. Requests are dealt
    so that the second model gets its share. It stops when its error rate is surely higher, or its
    ratings (POST /v1/ratings) are surely lower, at 95 % over all looks. GET /v1/arms shows both.

    \b
    Example:
      holdfast serve runs/tuned
      holdfast serve runs/tuned --canary runs/newer --share 0.05
      holdfast serve runs/tuned --drift held_out.jsonl --on-drift "holdfast train run.yaml"
    """
    from holdfast.wire.http.server import HttpListener
    from holdfast.wire.http.sockets import address_of, bind_listener
    from holdfast_platform.serve.arms import Arms
    from holdfast_platform.serve.server import CompletionApplication

    if canary is None:
        refuse_beside("one model", {"--ab": ab})
    if drift is None and on_drift is not None:
        raise ConfigError(
            "nothing looks for drift", where="--on-drift", remedy="name the baseline with --drift"
        )
    if not 0 < share <= 0.5:
        raise ConfigError(
            f"{share:g} is no share of a second model",
            where="--share",
            remedy="use 0.05, at most 0.5",
        )
    key = _key(host, key_variable)
    first = _open(model, "", slots)
    models = {first.name: first}
    second = None if canary is None else _open(run_path(canary), first.name, slots)
    if second is not None:
        models[second.name] = second
    arms = Arms(first.name, None if second is None else second.name, share, not ab)
    watch = None if drift is None else DriftWatch(first, drift, on_drift, finding)
    listen = bind_listener(host, port, "--port")
    application = CompletionApplication(
        models, arms, say, key, (lambda ids: None) if watch is None else watch.take
    )
    say(f"serves {', '.join(models)} at http://{address_of(listen)}/v1")
    asyncio.run(HttpListener(application, listen).serve())


def _key(host: str, key_variable: str | None) -> str:
    """The key of requests; "" for none, if only this machine can reach it. Raises ConfigError."""
    from holdfast.config.sections.peers import is_loopback

    key = os.environ.get(key_variable, "") if key_variable else ""
    if key_variable and not key:
        raise ConfigError(
            f"the environment variable {key_variable} is empty or missing",
            where="--key-variable",
            remedy=f"export {key_variable}=KEY",
        )
    if not key and not is_loopback(host):
        raise ConfigError(
            f"other machines could ask at {host} without a key",
            where="--host",
            remedy="name a variable with a key: --key-variable HOLDFAST_SERVE_KEY",
        )
    return key


def _open(path: Path, taken: str, slots: int) -> ServedModel:
    from holdfast.evaluation.model import open_model
    from holdfast_platform.serve.server import ServedModel

    opened = open_model(path, None, None, say)
    name = path.absolute().name
    name = f"{name}-second" if name == taken else name
    say(f"{name}: {opened.source}")
    return ServedModel(name, opened, slots)


class DriftWatch:
    """Compares live prompts with a file of rows, in a thread of its own."""

    def __init__(self, served: ServedModel, rows: Path, command: str | None, finding: Path):
        from holdfast.config.sections.rewards import PromptsConfig
        from holdfast.rollout.prompts import read_prompts
        from holdfast_platform.serve.arms import Drift

        self._served, self._command, self._finding = served, command, finding
        entry = PromptsConfig(path=str(rows))
        prompts = read_prompts([entry], served.model.texts.data, key="--drift")
        losses = [self._loss(prompt.ids) for prompt in prompts if len(prompt.ids) > 1]
        if len(losses) < 20:
            raise ConfigError(
                f"{len(losses)} prompts of two tokens or more tell no drift",
                where=str(rows),
                remedy="use 20 or more; some hundreds see smaller changes",
            )
        self._drift: Drift | None = Drift(losses)
        self._queue: queue.Queue[list[int]] = queue.Queue(maxsize=64)
        threading.Thread(target=self._work, name="drift", daemon=True).start()

    def take(self, ids: list[int]) -> None:
        """Take a live prompt, unless too many wait."""
        if len(ids) > 1 and not self._queue.full():
            self._queue.put_nowait(ids)

    def _loss(self, ids: list[int] | tuple[int, ...]) -> float:
        return self._served.model.text_loss(ids) / (len(ids) - 1)

    def _work(self) -> None:
        while self._drift is not None:
            found = self._drift.add(self._loss(self._queue.get()))
            if found is None:
                continue
            self._drift = None
            about = {"model": self._served.name, "time": round(time.time(), 3), **found}
            replace_file(self._finding, json.dumps(about, indent=2) + "\n")
            say(f"live prompts have drifted from the baseline: {self._finding}")
            if self._command is not None:
                path = str(self._finding.absolute())
                subprocess.Popen(
                    self._command, shell=True, env=os.environ | {"HOLDFAST_DRIFT": path}
                )
