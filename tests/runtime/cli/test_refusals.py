"""Every refusal in `src` has a place and a remedy, and what a remedy names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from holdfast.config.loading.fields import field_at
from tests.runtime.cli.remedies.sites import SOURCES, VALUE, Refusal, all_refusals, refusals_of


def test_refusals_keep_the_rules() -> None:
    refusals = all_refusals()
    assert len(refusals) > 900
    assert [f"{one.module}: {said}" for one in refusals for said in complaints(one)] == []


def test_what_is_exempt_is_there() -> None:
    for name in " ".join(EXEMPT.values()).split():
        module, _, function = name.partition(":")
        [path] = SOURCES.glob(f"*/{module}")
        assert f"def {function}" in path.read_text("utf-8"), name


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ("UserError('it failed', where=path)", "no remedy"),
        ("UserError('it failed', where=path, remedy=None)", "no remedy"),
        ("UserError('it failed', remedy='try again')", "names no place"),
        ("UserError('bad', where=p, remedy='use train.stepz=3')", "train.stepz is no key"),
        ("UserError('bad', where=p, remedy=f'set trian.steps to {n}')", "trian.steps is no key"),
        ("UserError('bad', where=p, remedy=f'use {n} or layout.workerz={n}')", "workerz is no key"),
        ("UserError('bad', where=p, remedy=f'use fodler={n}')", "fodler is no key"),
        ("UserError('bad', where='layout.wrkers', remedy='use 3')", "layout.wrkers is no key"),
        ("UserError('bad', where=p, remedy=R)", "train.stepz is no key"),
        ("UserError('bad', where=p, remedy=remedy_of(p))", "train.stepz is no key"),
        ("refuse('bad', 'use train.stepz')", "train.stepz is no key"),
    ],
)
def test_a_planted_fault_is_found(call: str, complaint: str) -> None:
    text = f"""
R = "use train.stepz"

def remedy_of(path):
    return R if path else ""

def refuse(message, remedy):
    raise UserError(message, where="train.steps", remedy=remedy)

def check(path, n, p):
    raise {call}
"""
    said = [said for one in refusals_of(text, "holdfast/x.py") for said in complaints(one)]
    assert any(complaint in one for one in said), said


# --- rules for every refusal of `src` -------------------------------------------------------------
EXEMPT = {
    "caught inside: a reader takes the next copy, or a writer tries again": """
        checkpoint/bucket/copy_lease.py checkpoint/bucket/uploader.py
        checkpoint/capture/copy_plan.py checkpoint/interop/dcp.py:cast_bits
        checkpoint/memory/arena_pool.py checkpoint/restore/fallback_store.py
        checkpoint/save/single_writer.py core/format/flat_names.py core/format/manifest.py
        elastic/agent/run_folder_monitor.py layout.py:index_of layout.py:replica_of
        parallel/axes/process_groups.py""",
    "checked before, with a remedy": """
        core/data/sample_order.py core/schedule/check.py launch/local.py layout.py:__post_init__
        layout.py:place_replicas parallel/pipeline/pipeline.py""",
    "an error of another program or of a user's code, as it came": """
        elastic/run_result.py launch/owners/kubernetes/kubectl.py
        launch/owners/ray/errors.py:explain tasks/task/loading.py:user_code tasks/script.py
        training/engine/lora_task.py wire/store/bucket_errors.py:_unreachable_error
        wire/store/run_store.py:translate_os_error""",
    "the caller names the place": """
        checkpoint/restore/inspect.py:find_commit_key config/loading/paths.py:_located
        model/generate.py:generate""",
}
"""Reason -> modules, or functions, whose refusals need no remedy or no place."""
NO_KEYS = ("holdfast", "torch", "run", "self", "step", "metadata", "my_task", "trainer")
"""First words of dotted names that are no keys: modules, and what a script has."""
NO_SETTINGS = frozenset(
    {"allow_http", "args", "ca", "collate", "compress", "credentials", "cycle_momentum"}
    | {"endpoint", "eval_strategy", "format", "key", "lost", "mode", "nodes", "nofile", "on"}
    | {"port", "red", "reduction", "region", "report_to", "requires_grad", "retries", "seal"}
    | {"slots", "store_interval_s", "timeout", "tp", "user", "version", "virtual_host", "workers"}
)
"""Names before `=` of other things than the run file: of addresses, of Python, of a layout."""
MORE_KEYS = {"model.from", "lora.from", "model.code", "model.dropout"}
"""Three stand for other keys until the file is read; the last one is a tokenizer's."""
_FILE = r"\.(?:py|md|json|ya?ml|csv|txt|toml|jsonl|html|com|io|org|safetensors|log|so|bin|index)$"
_KEY = rf"(?<![\w./:@%{VALUE}*-])[a-z_]+(?:\.[a-z_0-9{VALUE}]+)*(?:\.[a-z_{VALUE}]+|=)"
_PLACE = rf"{VALUE}|--[a-z]|\b[a-z_]+\.[a-z_]+|holdfast|'|[a-z]_[a-z]"


def complaints(refusal: Refusal) -> Iterator[str]:
    """Say what is wrong with a refusal."""
    remedies = refusal.remedy or frozenset()
    texts = [*refusal.message, *remedies, *(refusal.where or ())]
    is_literal = any(text.replace(VALUE, "").strip() for text in refusal.message)
    is_literal = is_literal and not _is_exempt(refusal)
    if is_literal and not any(remedies):
        yield "has no remedy"
    if is_literal and refusal.where is None and not any(re.search(_PLACE, t) for t in texts):
        yield "names no place, key, option, path or command"
    for text in [*remedies, *(refusal.where or ())]:
        yield from (f"{key} is no key" for key in _keys(text) if not _is_key(key))


def _is_exempt(refusal: Refusal) -> bool:
    module = refusal.module.rpartition(":")[0].partition("/")[2]
    names = " ".join(EXEMPT.values()).split()
    return module in names or f"{module}:{refusal.function}" in names


def _keys(text: str) -> Iterator[str]:
    """Yield what stands like a key of the run file: a.b, a.b=, a=."""
    for match in re.finditer(_KEY, text):
        key = match[0].partition(VALUE)[0].rstrip("=.")
        is_call = text[match.end() : match.end() + 1] in ("(", "/")
        if is_call or re.search(_FILE, key) or key.split(".")[0] in NO_KEYS:
            continue
        if "." in key or (match[0].endswith("=") and key not in NO_SETTINGS):
            yield key


def _is_key(key: str) -> bool:
    return key in MORE_KEYS or field_at(key.split(".")) is not None
