"""Does the tasks of a preparation on a Ray cluster instead of processes of this machine.

The parent never imports ray: a client of Ray may hang, and ends its own process when it loses its
head. A child process (`ray_driver.py`) speaks to the cluster. It gets a list of tasks as a JSON
line, stores each result where the task says, and answers with a line for each.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from holdfast.data.stages.task_pool import Task, error_from_json
from holdfast.errors import ConfigError, HoldfastError
from holdfast.wire.child_command import module_command

CONNECT_TIMEOUT_S = 120.0
"""Seconds until a cluster has answered; Ray itself takes some, and importing it, too."""
ADDRESS_REMEDY = "name the address that ray start --head prints: --address HOST:PORT"


class RayPool:
    """As `task_pool.TaskPool`. address: of the cluster's head; empty: what RAY_ADDRESS says, or the
    cluster of this machine."""

    def __init__(self, address: str) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS", "") or "auto"
        self._driver: subprocess.Popen[str] | None = None

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._driver is not None:
            self._driver.kill()  # results are complete or absent, and Ray ends what it runs
            with self._driver:
                pass

    def run(self, tasks: Sequence[Task], on_done: Callable[[Task], None]) -> None:
        """Do every task, `on_done` called after each. Raises the first error of any task, and
        ConfigError for a cluster that cannot be used."""
        if not tasks:
            return
        driver = self._driver or self._start()
        assert driver.stdin is not None
        with suppress(BrokenPipeError):  # it exited; the answer says so
            driver.stdin.write(json.dumps(list(tasks)) + "\n")
            driver.stdin.flush()
        for _ in tasks:
            on_done(tasks[int(self._answer(driver)["done"])])

    def _start(self) -> subprocess.Popen[str]:
        driver = self._driver = subprocess.Popen(
            module_command("holdfast.data.stages.ray_driver", self._address),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert driver.stdout is not None
        begun = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(driver.stdout, selectors.EVENT_READ)
            if not selector.select(CONNECT_TIMEOUT_S):
                raise ConfigError(
                    f"the Ray cluster at {self._address} does not answer within "
                    f"{time.monotonic() - begun:.0f} s",
                    where="--address",
                    remedy=ADDRESS_REMEDY,
                )
        self._answer(driver)
        return driver

    def _answer(self, driver: subprocess.Popen[str]) -> dict[str, Any]:
        assert driver.stdout is not None
        line = driver.stdout.readline()
        if not line:
            raise HoldfastError(
                f"the connection to the Ray cluster at {self._address} has ended (exit code "
                f"{driver.wait()}); the same command resumes"
            )
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise self._refusal(str(answer["refused"]), str(answer["detail"]))
        if "error" in answer:
            raise error_from_json(answer["error"])
        return answer

    def _refusal(self, kind: str, detail: str) -> ConfigError:
        if kind == "absent":
            return ConfigError(
                f"Ray or its data library cannot be imported here ({detail})",
                where="--on ray",
                remedy="install it with: pip install 'holdfast[ray]'",
            )
        return ConfigError(
            f"no Ray cluster can be used at {self._address} ({detail})",
            where="--address",
            remedy=ADDRESS_REMEDY,
        )
