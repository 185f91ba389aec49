"""What a process does for the first time only once, done before it is needed.

torch loads and makes much when it is first used: the threads of its backward pass, the kernels'
dispatch tables, gloo's device. A standby pays for it while nobody waits.
"""

from __future__ import annotations

import importlib

import torch

_FIRST_STEP: tuple[str, ...] = ()
"""What a first step imports and the template does not."""


def warm_up() -> None:
    for name in _FIRST_STEP:
        importlib.import_module(name)
    x = torch.ones(2, 2, requires_grad=True)
    torch.autograd.backward((x @ x).sum())
