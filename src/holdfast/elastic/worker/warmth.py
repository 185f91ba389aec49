"""Work that a process does only at its first step, done before it is needed.

The fork server has imported all that a step imports. The rest is the threads of the backward pass,
and what torch makes at its first use. A standby does this while no rank waits for it.
"""

from __future__ import annotations

import torch


def warm_up() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    torch.autograd.backward((x @ x).sum())
