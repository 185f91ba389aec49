"""A model of the durable commit, in which every process may be late.

Three generations open one run store, one after the other. The new leader opens each when the one
before is lost, or is cut off and does not know it. Each part may stop before any of its steps for
any time (it is slow, or a zombie), or for ever (it was killed). A killed mover is replaced, and the
new one adopts the stored saves. The run store's own functions run unchanged, over a store whose
reads may be older than their later writes.

    beginning a generation    opened --older ones never begin--> settled --choose--> chosen
                                     --is mine the newest?--> checked --note--> begun
    committing in it          begun --is mine the newest?--> part --all parts there?--> whole
                                    --is mine the newest?--> checked --commit object--> done
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from holdfast.checkpoint.restore.start_records import close_unstarted, is_superseded, record_start
from holdfast.checkpoint.save.writer import check_fence
from holdfast.core.format.manifest import commit_key, parse_commit_key
from holdfast.errors import FencedError
from holdfast.wire.store.run_store import AlreadyExistsError, MissingKeyError
from holdfast.wire.term import generation_key

GENERATIONS = 3
Objects = frozenset[tuple[str, bytes]]


class BranchError(AssertionError):
    """Two states of the run are taken for committed, or none."""


class View:
    """A run store: what is read is as it was, what is created is created now."""

    def __init__(self, read: Objects, now: Objects) -> None:
        self._read, self.now = dict(read), dict(now)

    def list(self, prefix: str) -> list[str]:
        return [key for key in self._read if key.startswith(prefix)]

    def get(self, key: str) -> bytes:
        if key not in self._read:
            raise MissingKeyError(key)
        return self._read[key]

    def create(self, key: str, content: Any) -> None:
        if key in self.now:
            raise AlreadyExistsError(key)
        self.now[key] = bytes(content)

    @property
    def objects(self) -> Objects:
        return frozenset(self.now.items())


class Line(NamedTuple):
    """One generation. begins: progress of the process that begins it. then: what that process has
    read. base: what the generation starts from, (step, generation) of a checkpoint, or (step, 0) of
    live state. at: the step that its workers have applied. saves, read: progress and reads of its
    mover."""

    begins: str = ""
    then: Objects = frozenset()
    base: tuple[int, int] = (0, 0)
    at: int = 0
    saves: str = ""
    read: Objects = frozenset()


class World(NamedTuple):
    objects: Objects
    lines: tuple[Line, ...]


def beginning() -> World:
    """Generation 1 trains from initial weights."""
    view = View(frozenset(), frozenset())
    view.create(generation_key(1), b"{}")
    view.create("starts/0000000001.json", b'{"step": 0}')
    return World(view.objects, (Line("begun"), *(Line() for _ in range(GENERATIONS - 1))))


class Step(NamedTuple):
    label: str
    world: World


def steps(world: World, settle: Callable[..., None] = close_unstarted) -> Iterator[Step]:
    for number in range(1, GENERATIONS + 1):
        yield from _begins(world, number, settle)
        yield from _saves(world, number)


def _begins(world: World, g: int, settle: Callable[..., None]) -> Iterator[Step]:
    line, now = world.lines[g - 1], world.objects
    match line.begins:
        case "" if world.lines[g - 2].begins:
            view = View(now, now)
            view.create(generation_key(g), b"{}")
            yield _put(f"{g} is opened", world, g, line._replace(begins="opened"), view.objects)
        case "opened":
            view = View(now, now)
            settle(view, g)  # type: ignore[arg-type]
            settled = line._replace(begins="settled")
            yield _put(f"{g} settles", world, g, settled, view.objects)
        case "settled":
            yield from _chooses(world, g)
        case "chosen":
            checked = line._replace(begins="checked", then=_seen(now))
            yield _put(f"{g} is the newest?", world, g, checked)
        case "checked":
            view = View(line.then, now)
            try:
                record_start(view, g, line.base[0])
            except FencedError:
                yield _put(f"{g} is fenced", world, g, Line("lost"), view.objects)
                return
            late = any(later.begins == "begun" for later in world.lines[g:])
            begun = Line("lost") if late else Line("begun", base=line.base, at=line.base[0])
            yield _put(f"{g} notes and begins", world, g, begun, view.objects)
    if line.begins in ("opened", "settled", "chosen", "checked"):
        yield _put(f"who begins {g} is killed", world, g, Line("lost"))


def _chooses(world: World, g: int) -> Iterator[Step]:
    """The newest checkpoint that was not given up; or, where the newest generation's processes are
    there, what they hold."""
    line, view = world.lines[g - 1], View(world.objects, world.objects)
    yield _put(f"{g} reads", world, g, line._replace(begins="chosen", base=newest(view, g)))
    for number in range(g - 1, 0, -1):
        older = world.lines[number - 1]
        if older.begins == "begun":
            chosen = line._replace(begins="chosen", base=(older.at, 0))
            yield _put(f"{g} goes on from {number}", world, g, chosen)
            return


def newest(view: View, present: int) -> tuple[int, int]:
    """As `RestorePointFinder.find_newest` orders them, and passes over what was given up."""
    for step, generation in sorted(commits(view.objects), reverse=True):
        if not is_superseded(view, present, generation, step):  # type: ignore[arg-type]
            return step, generation
    return 0, 0


def commits(objects: Objects) -> list[tuple[int, int]]:
    return [found for key, _ in objects if (found := parse_commit_key(key))]


def _saves(world: World, g: int) -> Iterator[Step]:
    line, now = world.lines[g - 1], world.objects
    if line.begins != "begun":
        return
    ruled = any(later.begins == "begun" for later in world.lines[g:])
    if line.at == line.base[0] and not ruled:
        yield _put(f"{g} trains", world, g, line._replace(at=line.at + 1))
    step = line.base[0] + 1
    key = commit_key(g, step)
    match line.saves:
        case "" if line.at == step:
            yield _put(f"{g} would write", world, g, line._replace(saves="part", read=_seen(now)))
        case "part":
            yield from _fenced(world, g, "whole", f"parts/{g}/{step}")
        case "whole":
            looked = line._replace(saves="checked", read=_seen(now))
            yield _put(f"{g} would commit", world, g, looked)
        case "checked":
            yield from _fenced(world, g, "done", key)
            killed = line._replace(saves="whole", read=frozenset())
            yield _put(f"the mover of {g} is killed", world, g, killed)


def _fenced(world: World, g: int, saves: str, key: str) -> Iterator[Step]:
    """What `write_part` and `try_commit` do: look at the fence, then create."""
    line = world.lines[g - 1]
    view = View(line.read, world.objects)
    try:
        check_fence(view, g)  # type: ignore[arg-type]
        view.create(key, str(g).encode())
    except FencedError:
        saves = "fenced"
    after = line._replace(saves=saves, read=frozenset())
    yield _put(f"{g} writes {key.partition('/')[0]}", world, g, after, view.objects)


def _seen(objects: Objects) -> Objects:
    """What a look at the fence takes in."""
    return frozenset(one for one in objects if one[0].startswith(("generations/", "starts/")))


def _put(label: str, world: World, g: int, line: Line, objects: Objects | None = None) -> Step:
    lines = (*world.lines[: g - 1], line, *world.lines[g:])
    return Step(label, World(world.objects if objects is None else objects, lines))


def safe(world: World) -> None:
    """One line of the run counts, and all of it."""
    view = View(world.objects, world.objects)
    begun = [g for g, line in enumerate(world.lines, 1) if line.begins == "begun"]
    rules, present = begun[-1], GENERATIONS + 1
    step, of = world.lines[rules - 1].base
    for at, g in commits(world.objects):
        counts = not is_superseded(view, present, g, at)  # type: ignore[arg-type]
        if counts and g < rules and at > step:
            raise BranchError(f"step {at} of generation {g} counts, and {rules} began from {step}")
        if not counts and (at, g) == (step, of):
            raise BranchError(f"generation {rules} began from step {at} of {g}, which is given up")
        if not counts and g == rules:
            raise BranchError(f"step {at} of generation {g}, which rules, is given up")


def search(settle: Callable[..., None] = close_unstarted) -> dict[World, tuple[World, str] | None]:
    """Every world, and how it came to it. Raises BranchError, with the way."""
    first = beginning()
    back: dict[World, tuple[World, str] | None] = {first: None}
    front = [first]
    for world in front:
        try:
            safe(world)
        except BranchError as error:
            raise BranchError(f"{error}, after\n{way(back, world)}") from None
        for label, after in steps(world, settle):
            if after not in back:
                back[after] = world, label
                front.append(after)
    return back


def way(back: dict[World, tuple[World, str] | None], world: World) -> str:
    said = []
    while (before := back[world]) is not None:
        world, label = before
        said.append(label)
    return "\n".join(reversed(said))
