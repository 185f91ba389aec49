"""Knows a git-lfs pointer: the small text that lies in place of a file that was not fetched."""

from __future__ import annotations

POINTER_HEAD = b"version https://git-lfs.github.com/spec/"
POINTER_MESSAGE = "this is a git-lfs pointer, not the file"
POINTER_REMEDY = "run git lfs pull where it was cloned"


def is_pointer(head: bytes) -> bool:
    """head: the first bytes of a file."""
    return head.startswith(POINTER_HEAD)
