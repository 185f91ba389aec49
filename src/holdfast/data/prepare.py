"""From sources to a dataset: scan, choose, train the tokenizer, tokenise, join.

    scan       every unit, in parallel: hash each document            .prepare/scan/<unit>
    choose     drop duplicates, split by hash                         (recomputed, seconds)
    tokenizer  train a byte-level BPE, or take the one given          .prepare/tokenizer.json
    tokenise   every unit, in parallel                                .prepare/tokens/<unit>
    join       unit results into shards; baselines; the manifest      shards/, manifest.json

Each stage ends in files that are complete or absent. A preparation that was killed therefore does
only what is missing. The manifest is written last: without it there is no dataset. Texts are read
twice, because tokenising costs fifty times as much as reading. Until the end, the unit results
need as much disk as the shards.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128

from holdfast.config.data import DataConfig
from holdfast.core.data.special_tokens import KNOWN_ENDS
from holdfast.data import vocabulary
from holdfast.data.baselines import MAX_TOKENS, baselines
from holdfast.data.dataset import FORMAT, MANIFEST, Dataset, TokenStream, exists, with_version
from holdfast.data.dedup_split import (
    DocumentChoice,
    DocumentRows,
    choose_documents,
    tokenizer_sample,
)
from holdfast.data.files import (
    canonical_json,
    checksum,
    explain_os_errors,
    file_checksum,
    write_atomic,
)
from holdfast.data.shards import Shard, write_shards
from holdfast.data.sources import (
    SourcePlan,
    Unit,
    count_files,
    plan_source,
    read_unit,
    source_names,
)
from holdfast.data.task_pool import Task, TaskPool
from holdfast.data.unit_tasks import SPLITS, read_result, read_scan
from holdfast.errors import CorruptError, DataError
from holdfast.plan.hardware import usable_cores

WORK_FOLDER = ".prepare"

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]  # (what is being done, units done, units)


def _no_progress(what: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


def prepare_dataset(
    config: DataConfig, say: Say = print, progress: Progress | None = None, *, wait: bool = False
) -> Dataset:
    """Return the dataset of `config.folder`, and prepare it if it does not exist. `wait`: if
    another process prepares it already, wait, as the nodes of one run do that begin together.

    The result depends on the sources and the settings alone: not on the number of processes,
    not on interruptions. Raises DataError for unusable sources or an unusable tokenizer. Raises it
    also for a folder that holds another dataset or that another process is preparing. Raises
    OutOfSpaceError when the disk is full; finished units stay, and the same call resumes.
    """
    folder = Path(config.folder)
    with explain_os_errors(folder):
        wanted = content_settings(config)
        if exists(folder):
            dataset = Dataset.open(folder)
            check_settings_match(dataset, wanted, config.tokenizer.path)
            if changed := changed_sources(config, dataset):
                say(
                    f"{folder} stays as it was prepared, though its sources have changed "
                    f"({'; '.join(changed)}): name another data.folder to read them anew"
                )
            # left by a kill after the manifest
            shutil.rmtree(folder / WORK_FOLDER, ignore_errors=True)
            return dataset
        _make_folder(folder / WORK_FOLDER)
        with _locked_folder(folder, say if wait else None):
            if not exists(folder):
                _Preparation(config, folder, wanted, say, progress or _no_progress).run()
            shutil.rmtree(folder / WORK_FOLDER, ignore_errors=True)
        return Dataset.open(folder)


def content_settings(config: DataConfig) -> dict[str, Any]:
    """Return the part of the run file that decides the content of a dataset (weights, processes and
    the length of a sample do not)."""
    tokenizer: dict[str, Any]
    if config.tokenizer.path is None:
        tokenizer = {
            "vocab_size": config.tokenizer.vocab_size,
            "sample_bytes": config.tokenizer.sample_bytes,
        }
    else:
        path = Path(config.tokenizer.path).expanduser()
        loaded = vocabulary.load_tokenizer(path)
        known = vocabulary.describe_tokenizer(loaded, path)
        tokenizer = {"xxh3": file_checksum(path)}
        if known.end_token != next((t for t in KNOWN_ENDS if t in loaded.get_vocab()), None):
            tokenizer["end_token"] = known.end_token  # said by the files next to it
        if known.begin_id is not None:
            tokenizer["begin"] = known.begin_id
    names = source_names(config.sources)
    return {
        "sources": [
            {"kind": s.kind, "name": n, "path": s.path, "field": s.field, "split": s.split}
            for s, n in zip(config.sources, names, strict=True)
        ],
        "tokenizer": tokenizer,
        "validation_fraction": config.validation_fraction,
    }


def check_settings_match(dataset: Dataset, wanted: dict[str, Any], tokenizer: str | None) -> None:
    """Raises DataError when a dataset was made from other settings than the run file's."""
    made = dataset.manifest["settings"]
    if tokenizer is not None:
        check_tokenizer_match(dataset, Path(tokenizer).expanduser())
    for key in ("sources", "tokenizer", "validation_fraction"):
        if key == "tokenizer" and tokenizer is not None:
            continue
        if made[key] != wanted[key]:
            raise DataError(
                f"the dataset there was prepared with another data.{key} "
                f"({json.dumps(made[key])}, not {json.dumps(wanted[key])})",
                where=str(dataset.folder),
                remedy="name another data.folder, or remove this one",
            )


def changed_sources(config: DataConfig, dataset: Dataset) -> list[str]:
    """Sources whose files are more, fewer or of another size than when they were read. One that
    is not there any more has not changed: a dataset stands for itself."""
    changed = []
    for index, (source, made) in enumerate(
        zip(config.sources, dataset.manifest["sources"], strict=True)
    ):
        found = count_files(source, index)
        if found is not None and found != (made["files"], made["bytes"]):
            changed.append(
                f"{made['name']}: {made['files']:,} files of {made['bytes']:,} bytes then, "
                f"{found[0]:,} of {found[1]:,} now"
            )
    return changed


def check_tokenizer_match(dataset: Dataset, path: Path) -> None:
    """Raises DataError when a tokenizer.json gives tokens other meanings than the dataset's."""
    if difference := vocabulary.describe_difference(path, dataset.tokenizer_path):
        raise DataError(
            f"{path} does not match the dataset in {dataset.folder}: {difference}",
            where="data.tokenizer.path",
            remedy="name another data.folder, which is then prepared with it",
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise DataError(
            f"{error.filename} is a file, not a folder",
            where="data.folder",
            remedy="name another folder",
        ) from None


@contextmanager
def _locked_folder(folder: Path, wait: Say | None = None) -> Iterator[None]:
    """Hold a folder for one preparation; the kernel releases it when its process ends. If another
    process holds it, call `wait` with a message and wait for that process."""
    with (folder / WORK_FOLDER / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait is not None:
                wait(f"another process is preparing the dataset in {folder}: waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
                return
            raise DataError(
                "another process is preparing this dataset",
                where=str(folder),
                remedy="wait for it, or name another data.folder",
            ) from None
        yield


@dataclass
class _Preparation:
    """One preparation; the methods are its stages in order."""

    config: DataConfig
    folder: Path
    wanted: dict[str, Any]
    say: Say
    progress: Progress

    def run(self) -> None:
        self.plans = self._plan()
        self.units = [unit for plan in self.plans for unit in plan.units]
        self._resume_or_clear()
        with TaskPool(self._processes()) as pool:
            raw, rows = self._scan(pool)
            names = [plan.name for plan in self.plans]
            sources = [unit.source for unit in self.units]
            choice = choose_documents(rows, sources, names, self.config.validation_fraction)
            self._say_counts(choice)
            known = self._tokenizer(rows, choice)
            self._tokenise(pool, raw, choice, known)
        self._join(rows, choice, known)

    def _path(self, stage: str, unit: Unit) -> Path:
        return self.folder / WORK_FOLDER / stage / f"{unit.index:08d}"

    def _plan(self) -> list[SourcePlan]:
        plans: list[SourcePlan] = []
        for index, source in enumerate(self.config.sources):
            plans.append(plan_source(source, index, sum(len(p.units) for p in plans)))
        return plans

    def _resume_or_clear(self) -> None:
        """Keep the unit results that exist, unless they are of other sources or settings."""
        plan = {"format": FORMAT, "settings": self.wanted, "stamps": [p.stamp for p in self.plans]}
        path = self.folder / WORK_FOLDER / "plan.json"
        if path.exists() and path.read_bytes() != canonical_json(plan):
            self.say("the sources or settings have changed: starting over")
            for stage in ("scan", "tokens", "lots"):
                shutil.rmtree(self.folder / WORK_FOLDER / stage, ignore_errors=True)
            (self.folder / WORK_FOLDER / "tokenizer.json").unlink(missing_ok=True)
        for stage in ("scan", "tokens", "lots"):
            (self.folder / WORK_FOLDER / stage).mkdir(exist_ok=True)
        write_atomic(path, [canonical_json(plan)])

    def _processes(self) -> int:
        """Return 0 (right here) for a single unit, otherwise one process per usable core."""
        cores = self.config.processes or usable_cores()
        return 0 if len(self.units) == 1 else min(cores, len(self.units))

    def _run_stage(
        self, pool: TaskPool, what: str, stage: str, task: Callable[[Unit], Task]
    ) -> None:
        """Do a stage's task for each unit that has no result yet."""
        missing = [u for u in self.units if not _is_whole(self._path(stage, u))]
        done = len(self.units) - len(missing)
        if done and missing:
            self.say(f"{what}: {done} of {len(self.units)} pieces were done before")
        self.progress(what, done, len(self.units))

        def count(_: Task) -> None:
            nonlocal done
            done += 1
            self.progress(what, done, len(self.units))

        pool.run([task(u) for u in missing], count)

    def _scan(self, pool: TaskPool) -> tuple[list[str], list[DocumentRows]]:
        limit = self.config.max_document_bytes
        self._run_stage(
            pool,
            "reading",
            "scan",
            lambda unit: {
                "do": "scan",
                "unit": unit.to_json(),
                "limit": limit,
                "out": str(self._path("scan", unit)),
            },
        )
        found = [read_scan(self._path("scan", unit)) for unit in self.units]
        return [raw for raw, _ in found], [rows for _, rows in found]

    def _say_counts(self, choice: DocumentChoice) -> None:
        for plan, count in zip(self.plans, choice.counts, strict=True):
            left = count.documents - count.empty - count.duplicates
            self.say(
                f"{plan.name}: {left:,} documents ({count.empty:,} empty and "
                f"{count.duplicates:,} duplicate ones left out)"
            )

    def _tokenizer(self, rows: list[DocumentRows], choice: DocumentChoice) -> vocabulary.Vocabulary:
        path = self.folder / WORK_FOLDER / "tokenizer.json"
        given = self.config.tokenizer.path
        if given is not None:
            write_atomic(path, [Path(given).expanduser().read_bytes()])
        elif not path.exists():
            masks = tokenizer_sample(rows, choice.lots, self.config.tokenizer.sample_bytes)
            size = sum(int(r[m, 2].sum()) for r, m in zip(rows, masks, strict=True))
            vocab = self.config.tokenizer.vocab_size
            self.say(f"training a byte-level BPE of {vocab:,} on {size / 1e6:.1f} MB")
            text = vocabulary.train_tokenizer(self._sample(masks), vocab)
            write_atomic(path, [text.encode()])
        described = path if given is None else Path(given).expanduser()
        known = vocabulary.describe_tokenizer(vocabulary.load_tokenizer(path), described)
        if known.begin_id is not None:
            self.say(f"each document begins with token {known.begin_id}, as prompts will")
        return known

    def _sample(self, masks: list[np.ndarray[Any, np.dtype[np.bool_]]]) -> Iterator[str]:
        limit = self.config.max_document_bytes
        for unit, mask in zip(self.units, masks, strict=True):
            if mask.any():
                texts = read_unit(unit, limit, xxh3_128())
                yield from (t for t, m in zip(islice(texts, len(mask)), mask, strict=True) if m)

    def _tokenise(
        self, pool: TaskPool, raw: list[str], choice: DocumentChoice, known: vocabulary.Vocabulary
    ) -> None:
        def task(unit: Unit) -> Task:
            lots = self._path("lots", unit)
            write_atomic(lots, [choice.lots[unit.index].tobytes()])
            return {
                "do": "tokenise",
                "unit": unit.to_json(),
                "raw": raw[unit.index],
                "limit": self.config.max_document_bytes,
                "lots": str(lots),
                "tokenizer": str(self.folder / WORK_FOLDER / "tokenizer.json"),
                "end": known.end_id,
                "begin": known.begin_id,
                "dtype": known.dtype,
                "out": str(self._path("tokens", unit)),
            }

        self._run_stage(pool, "tokenising", "tokens", task)

    def _join(
        self, rows: list[DocumentRows], choice: DocumentChoice, known: vocabulary.Vocabulary
    ) -> None:
        self.say("writing shards")
        shutil.rmtree(self.folder / "shards", ignore_errors=True)  # of a join that was cut short
        (self.folder / "shards").mkdir()
        shards = {
            split: [
                write_shards(
                    self.folder,
                    split,
                    i,
                    [self._path("tokens", u) for u in plan.units],
                    self.config.shard_tokens,
                )
                for i, plan in enumerate(self.plans)
            ]
            for split in SPLITS
        }
        if not any(shards["validation"]):
            del shards["validation"]
        tokenizer = (self.folder / WORK_FOLDER / "tokenizer.json").read_bytes()
        write_atomic(self.folder / "tokenizer.json", [tokenizer], sync=True)
        splits = _split_counts(shards, rows, choice)
        content = {
            "format": FORMAT,
            "settings": self.wanted,
            "sources": self._source_lineage(rows, choice),
            "tokenizer": {
                "vocab_size": known.size,
                "end": known.end_id,
                "end_token": known.end_token,
                "dtype": known.dtype,
                "xxh3": checksum(tokenizer),
                **({} if known.begin_id is None else {"begin": known.begin_id}),
            },
            "splits": splits,
            "shards": {k: [[s.to_json() for s in one] for one in v] for k, v in shards.items()},
            "baselines": _baselines(self.folder, shards, splits, known),
        }
        manifest = with_version(content)
        write_atomic(self.folder / MANIFEST, [canonical_json(manifest)], sync=True)
        total = splits["train"]["tokens"]
        self.say(f"dataset {manifest['version']}: {total:,} training tokens in {self.folder}")

    def _source_lineage(
        self, rows: list[DocumentRows], choice: DocumentChoice
    ) -> list[dict[str, Any]]:
        """Return the origin of the tokens: each source with a hash of its documents' hashes and
        sizes, in order. The hash does not depend on how the source was cut into units."""
        out = []
        sources = zip(self.plans, self.wanted["sources"], choice.counts, strict=True)
        for plan, wanted, count in sources:
            digest = checksum(b"".join(rows[u.index].tobytes() for u in plan.units))
            out.append(
                {
                    **wanted,
                    "files": plan.files,
                    "bytes": plan.bytes,
                    "xxh3": digest,
                    **asdict(count),
                }
            )
        return out


def _is_whole(path: Path) -> bool:
    """Is a unit's result there? One that a power loss tore is removed."""
    if not path.exists():
        return False
    try:
        read_result(path)
    except CorruptError:
        path.unlink()
        return False
    return True


def _split_counts(
    shards: dict[str, list[list[Shard]]], rows: list[DocumentRows], choice: DocumentChoice
) -> dict[str, dict[str, int]]:
    out = {}
    for lot, split in enumerate(SPLITS, start=1):
        if split in shards:
            every = [s for one in shards[split] for s in one]
            size = sum(
                int(r[lots == lot, 2].sum()) for r, lots in zip(rows, choice.lots, strict=True)
            )
            out[split] = {
                "documents": sum(s.documents for s in every),
                "tokens": sum(s.tokens for s in every),
                "bytes": size,
            }
    return out


def _baselines(
    folder: Path,
    shards: dict[str, list[list[Shard]]],
    splits: dict[str, dict[str, int]],
    known: vocabulary.Vocabulary,
) -> dict[str, Any] | None:
    if "validation" not in shards:
        return None
    read = partial(TokenStream, folder, dtype=known.dtype)
    train = (read(shards=one) for one in shards["train"])
    validation = read(shards=[s for one in shards["validation"] for s in one])
    count = splits["validation"]
    around = 1 if known.begin_id is None else 2
    per_byte = (count["tokens"] - around * count["documents"]) / max(count["bytes"], 1)
    return baselines(
        (stream.read(0, MAX_TOKENS) for stream in train),
        validation.read(0, MAX_TOKENS),
        known.size,
        known.end_id,
        per_byte,
    )
