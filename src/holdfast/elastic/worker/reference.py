"""A computation of some milliseconds whose checksum tells whether two nodes give the same bits.

It runs in a child of the fork server, so that the fork server itself never computes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

DIGEST_BYTES = 8


def reference_checksum() -> str:
    """Return the checksum of matrix products, norms, exponentials and sums, in fp32 and bf16."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    numbers = torch.arange(96 * 128, dtype=torch.int64) * 2654435761 % (1 << 24)
    x = (numbers.to(torch.float32) / (1 << 23) - 1).reshape(96, 128).requires_grad_()
    w = (numbers.flip(0).to(torch.float32) / (1 << 23) - 1).reshape(128, 96).requires_grad_()
    hidden = functional.silu(x @ w)
    weights = torch.softmax(functional.layer_norm(hidden, (96,)), dim=-1)
    loss = (weights * hidden).sum() + torch.rsqrt(hidden.square().mean() + 1e-5)
    gradients = torch.autograd.grad(loss, (x, w))
    half = x.detach().bfloat16() @ w.detach().bfloat16()
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for tensor in (weights.detach(), loss.detach(), *gradients, half.float()):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def compute_in_child(compute: Callable[[], str] = reference_checksum) -> str:
    """Return the checksum, computed in a forked child; "" if the child fails."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, compute().encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        found = answer.read()
    os.waitpid(pid, 0)
    return found.decode()
