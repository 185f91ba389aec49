"""What a process does once only, when it does it first, done before it is needed.

All that a step imports the template has imported. What is left are the threads of the backward
pass, and whatever torch makes at its first use. A standby pays for it while nobody waits.
"""

from __future__ import annotations

import torch


def warm_up() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    torch.autograd.backward((x @ x).sum())
