"""What of a node decides the bits that it computes, and whether a node may join another.

Pure: `elastic/node/identity.py` looks at the machine.

    code        digest of the package's sources
    torch       its version, build and libraries
    settings    keys of the run file that have to be alike on all nodes
    processor   vendor, vector units, and variables that limit or choose them
    reference   checksum of a small computation by torch; "": not known

Another code, torch or setting makes nodes disagree on what a step is, so the node is refused.
Another processor may give other bits. What that means is the run file's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from holdfast.core.json_parsing import JsonMessage

LikeProcessors = Literal["warn", "require", "ignore"]
_UNSET = "unset"


@dataclass(frozen=True)
class NodeIdentity(JsonMessage):
    """The identity of one node's computation; see the module."""

    code: str = ""
    torch: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, str] = field(default_factory=dict)
    reference: str = ""


@dataclass(frozen=True)
class JoinVerdict:
    """Whether a node may join.

    refusal: why it may not; "" if it may. warning: what else differs.
    """

    refusal: str = ""
    warning: str = ""


def judge_joiner(
    ours: NodeIdentity,
    theirs: NodeIdentity,
    our_name: str,
    their_name: str,
    like_processors: LikeProcessors,
) -> JoinVerdict:
    """Compare the identity of a node that wants to join with the coordinator's."""
    for what, here, there in (
        ("code (digest)", ours.code, theirs.code),
        ("torch", ours.torch, theirs.torch),
    ):
        if here and there and here != there:
            return JoinVerdict(
                f"{their_name} runs another {what} than {our_name}: {there} there, {here} here; "
                "install the same version on all nodes"
            )
    for key in sorted(ours.settings.keys() & theirs.settings.keys()):
        here, there = ours.settings[key], theirs.settings[key]
        if here != there:
            return JoinVerdict(
                f"{key} is {_show(there)} on {their_name} and {_show(here)} on {our_name}; it has "
                "to be alike on all nodes of a run"
            )
    difference = _processor_difference(ours, theirs, our_name, their_name)
    if not difference or like_processors == "ignore":
        return JoinVerdict()
    if like_processors == "require":
        return JoinVerdict(f"{difference}; cluster.like_processors is require")
    return JoinVerdict(
        warning=f"{difference}; a step may give other bits there (cluster.like_processors)"
    )


def _processor_difference(
    ours: NodeIdentity, theirs: NodeIdentity, our_name: str, their_name: str
) -> str:
    """Return what differs between the processors, in words; "" if nothing is known to differ."""
    if not ours.processor or not theirs.processor:
        return ""  # an older agent
    for key in sorted(ours.processor.keys() | theirs.processor.keys()):
        here, there = ours.processor.get(key, _UNSET), theirs.processor.get(key, _UNSET)
        if here != there:
            return f"{their_name} computes with {key} {there}, {our_name} with {here}"
    if ours.reference and theirs.reference and ours.reference != theirs.reference:
        return (
            f"{their_name} computes other bits than {our_name}: the reference computation gives "
            f"{theirs.reference} there, {ours.reference} here"
        )
    return ""


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
