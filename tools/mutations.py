"""Change the source in small ways, and see which changes the tests notice.

python tools/mutations.py choose --other TREE --rooms core,wire --count 20 --seed 0 > mutations.json
python tools/mutations.py run mutations.json --out killed.json [--earlier OTHER.json]

`choose` takes places in functions that stand word by word in both trees. So one list of changes
serves to compare them. `run` makes one change at a time in the tree that it is called in. It runs
the tests of the room that import the changed module, and then all tests of the room. It writes
which test noticed the change. A second call continues with the rest.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCE = Path("src/holdfast")
TIMEOUT_S = 300.0  # for the tests of one stage: a change that never ends counts as noticed
SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.And: "or",
    ast.Or: "and",
}


Change = tuple[int, str, str]
"""Offset in the text of a function, what stands there, and what replaces it."""


@dataclass(frozen=True)
class Mutation:
    """One small change of one function."""

    room: str  # folder below src/holdfast
    module: str  # path below src/holdfast
    function: str  # dotted name in the module
    offset: int  # characters from the first one of the function to the changed text
    before: str  # the text at that place
    after: str  # what stands there instead


def functions(path: Path) -> Iterator[tuple[str, str, ast.AST]]:
    """The dotted name, the text and the tree of each function of a file."""
    text = path.read_text(encoding="utf-8")
    nested: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    while nested:
        prefix, parent = nested.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                nested.append((f"{prefix}{node.name}.", node))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                source = ast.get_source_segment(text, node)
                if source is not None:
                    yield prefix + node.name, source, ast.parse(source).body[0]


def changes(source: str, tree: ast.AST) -> Iterator[Change]:
    """The changes of a function's body that `run` can make."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        text = source[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(text.encode()[:column].decode())

    def between(
        left: ast.expr, right: ast.expr, operator: ast.AST
    ) -> Iterator[tuple[int, str, str]]:
        begin = offset(left.end_lineno or 0, left.end_col_offset or 0)
        gap = source[begin : offset(right.lineno, right.col_offset)]
        symbol = re.search(r"(is not|not in|is|in|and|or|[<>=!]=|[<>+*-]|//)", gap)
        if symbol and type(operator) in SWAPS:
            yield begin + symbol.start(), symbol.group(), SWAPS[type(operator)]

    for statement in getattr(tree, "body", []):
        for node in ast.walk(statement):
            if isinstance(node, ast.Raise | ast.JoinedStr):
                continue
            if isinstance(node, ast.Compare):
                for left, operator, right in zip(
                    [node.left, *node.comparators], node.ops, node.comparators, strict=False
                ):
                    yield from between(left, right, operator)
            elif isinstance(node, ast.BinOp):
                yield from between(node.left, node.right, node.op)
            elif isinstance(node, ast.BoolOp):
                yield from between(node.values[0], node.values[1], node.op)
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                yield offset(node.lineno, node.col_offset), "not ", ""
            elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
                begin = offset(node.lineno, node.col_offset)
                after = str(not node.value if isinstance(node.value, bool) else node.value + 1)
                yield begin, source[begin : offset(node.lineno, node.end_col_offset or 0)], after
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                begin = offset(node.lineno, node.col_offset)
                end = offset(node.end_lineno or 0, node.end_col_offset or 0)
                yield begin, source[begin:end], "None"


def choose(other: Path, rooms: list[str], count: int, seed: int) -> list[Mutation]:
    """`count` places of each room, the same for the same seed and the same two trees."""
    chosen = []
    for room in rooms:
        elsewhere = {
            (name, source)
            for path in sorted((other / SOURCE / room).rglob("*.py"))
            for name, source, _ in functions(path)
        }
        places = [
            Mutation(room, str(path.relative_to(SOURCE)), name, *change)
            for path in sorted((SOURCE / room).rglob("*.py"))
            for name, source, tree in functions(path)
            if (name, source) in elsewhere and "__repr__" not in name
            for change in changes(source, tree)
        ]
        chosen += random.Random(f"{seed}:{room}").sample(places, count)
    return chosen


def locate(mutation: Mutation) -> tuple[Path, str, str] | None:
    """The file, its text now, and its text with the change; None if the function is another one."""
    same_name = [SOURCE / mutation.module, *sorted((SOURCE / mutation.room).rglob("*.py"))]
    for path in same_name:
        if not path.is_file():
            continue
        for name, source, _ in functions(path):
            end = mutation.offset + len(mutation.before)
            if name != mutation.function or source[mutation.offset : end] != mutation.before:
                continue
            text = path.read_text(encoding="utf-8")
            changed = source[: mutation.offset] + mutation.after + source[end:]
            return path, text, text.replace(source, changed, 1)
    return None


def stages(path: Path, room: str) -> list[list[str]]:
    """The test files of a room that import a module, and then all of the room.

    If no test imports it, those count that import a module which does, and so on."""
    folder = next(p for p in (Path("tests/runtime") / room, Path("tests") / room) if p.is_dir())
    tests = {p: p.read_text(encoding="utf-8") for p in sorted(folder.rglob("test_*.py"))}
    sources = {p: p.read_text(encoding="utf-8") for p in sorted((SOURCE / room).rglob("*.py"))}
    seen, modules = {path}, [path]
    while modules:
        names = [".".join(p.relative_to("src").with_suffix("").parts) for p in modules]
        imports = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
        if importing := [str(test) for test, text in tests.items() if imports.search(text)]:
            return [importing, [str(folder)]]
        modules = [p for p, text in sources.items() if p not in seen and imports.search(text)]
        seen.update(modules)
    return [[str(folder)]]


def same_test(room: str, test: str) -> list[str]:
    """The arguments that select a test of another tree in this one; empty if its file is away."""
    file, _, name = test.partition("::")
    paths = [
        str(path) for path in sorted(Path("tests").rglob(Path(file).name)) if room in path.parts
    ]
    return [*paths, "-k", name.split("[")[0].split("::")[-1]] if paths and name else []


def noticed_by(tests: list[str], niceness: int) -> str | None:
    """The first failure of the tests, `timeout`, or None if all passed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not exhaustive", *tests]
    if any(Path(test).is_dir() for test in tests):
        command += ["-n", "2"]
    child = subprocess.Popen(
        ["nice", "-n", str(niceness), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        child.wait()
        return "timeout"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if child.returncode in (0, 5):  # 5: no test of that name is left
        return None
    return failed.group(1) if failed else output[-200:]


def run(
    mutations: list[Mutation],
    out: Path,
    niceness: int,
    max_stages: int,
    earlier: dict[str, str | None] | None,
) -> None:
    """Try each mutation, and write what noticed it after each one.

    earlier: the results of the other tree. What was not noticed there is not tried."""
    results = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    for number, mutation in enumerate(mutations, 1):
        key = f"{number}:{mutation.module}:{mutation.function}:{mutation.offset}"
        before = None if earlier is None else earlier[key]
        if key in results or (earlier is not None and before is None):
            continue
        place = locate(mutation)
        if place is None:
            results[key] = "the function is another one"
        else:
            path, text, changed = place
            tried = stages(path, mutation.room)[:max_stages]
            if before and (test := same_test(mutation.room, before)):
                tried.insert(0, test)
            try:
                path.write_text(changed, encoding="utf-8")
                results[key] = None
                for tests in tried:
                    results[key] = results[key] or noticed_by(tests, niceness)
            finally:
                path.write_text(text, encoding="utf-8")
        out.write_text(json.dumps(results, indent=1), encoding="utf-8")
        print(f"{number}/{len(mutations)} {key}: {results[key] or 'NOT NOTICED'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    choosing = commands.add_parser("choose")
    choosing.add_argument("--other", type=Path, required=True)
    choosing.add_argument("--rooms", default="core,checkpoint,elastic,parallel,wire")
    choosing.add_argument("--count", type=int, default=20)
    choosing.add_argument("--seed", type=int, default=0)
    running = commands.add_parser("run")
    running.add_argument("mutations", type=Path)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--nice", type=int, default=0)
    running.add_argument("--stages", type=int, default=2, help="1: only tests of the module")
    running.add_argument("--earlier", type=Path, help="the file that --out named in the other tree")
    arguments = parser.parse_args()
    if arguments.command == "choose":
        rooms = arguments.rooms.split(",")
        chosen = choose(arguments.other, rooms, arguments.count, arguments.seed)
        print(json.dumps([asdict(mutation) for mutation in chosen], indent=1))
    else:
        mutations = [Mutation(**m) for m in json.loads(arguments.mutations.read_text())]
        earlier = json.loads(arguments.earlier.read_text()) if arguments.earlier else None
        run(mutations, arguments.out, arguments.nice, arguments.stages, earlier)


if __name__ == "__main__":
    main()
