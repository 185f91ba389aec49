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

import ctypes
import errno
import fcntl
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128

from holdfast.config.sections.data import DataConfig
from holdfast.data.order.baselines import MAX_TOKENS, baselines
from holdfast.data.prepare.chat_preparation import ChatPreparation, SourceSize
from holdfast.data.prepare.dataset_match import (
    changed_code,
    changed_sources,
    check_settings_match,
    content_settings,
    describe_recipe,
    source_places,
)
from holdfast.data.prepare.remote_prepare import upload_dataset
from holdfast.data.prepare.remote_sources import fetch_source, fetch_sources
from holdfast.data.prepare.stage_recipes import StagePreparation
from holdfast.data.read import vocabulary
from holdfast.data.read.chat_documents import RowDocuments
from holdfast.data.read.features import FeatureFormat
from holdfast.data.read.files import canonical_json, checksum, explain_os_errors, write_atomic
from holdfast.data.read.preference_rows import DOCUMENTS
from holdfast.data.read.sources import SourcePlan, Unit, plan_source, read_unit
from holdfast.data.read.tokenizer_border import check_tokenizer_files, compare_ids
from holdfast.data.read.tokenizer_check import PROBE_BYTES, check_tokenizer
from holdfast.data.stages.dedup_split import (
    DocumentChoice,
    DocumentRows,
    choose_documents,
    describe_count,
    tokenizer_sample,
)
from holdfast.data.stages.scan_tasks import read_refused, read_scan
from holdfast.data.stages.task_pool import Pool, Task, TaskPool
from holdfast.data.stages.text_pieces import cut_text
from holdfast.data.stages.unit_files import UnitTables, read_result
from holdfast.data.stages.unit_tasks import SPLITS, read_ends
from holdfast.data.stream.dataset import (
    MANIFEST,
    RECIPE,
    REMOVED,
    SOURCES,
    Dataset,
    TokenStream,
    exists,
    with_paths_checksum,
    with_version,
)
from holdfast.data.stream.dataset_location import RemoteDataset, is_address
from holdfast.data.stream.shards import Shard, write_shards
from holdfast.data.stream.verify import is_list_damaged
from holdfast.errors import CorruptError, DataError
from holdfast.machine.limits import usable_cores
from holdfast.wire.store.slow_requests import slow_requests_said

WORK_FOLDER = ".prepare"
NAMED_FILES = 50
"""Bad files that one refusal names."""
COMPARED_TEXTS, COMPARED = 16, 2000
"""Texts, and characters of each, whose ids are compared with those of transformers."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a file system that has no locks."""

Say = Callable[[str], None]
MakePool = Callable[[int], Pool]
Progress = Callable[[str, int, int], None]  # (what is being done, units done, units)


def _no_progress(what: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


def prepare_dataset(
    config: DataConfig,
    say: Say = print,
    progress: Progress | None = None,
    *,
    wait: bool = False,
    pool: MakePool = TaskPool,
    mend: bool = False,
) -> Dataset:
    """Return the dataset of `config.folder`, and prepare it if it does not exist. `wait`: if
    another process prepares it already, wait, as the nodes of one run do that begin together.
    `pool`: makes what does the tasks, from a number of processes. `mend`: if the list of what
    stages left out is lost or damaged, it is made again from the sources.

    The result depends on the sources and the settings alone: not on the number of processes,
    not on interruptions. Raises DataError for unusable sources or an unusable tokenizer. Raises it
    also for a folder that holds another dataset or that another process is preparing. Raises
    OutOfSpaceError when the disk is full; finished units stay, and the same call resumes.
    """
    with slow_requests_said(say):
        if is_address(config.folder):
            return _prepare_remote(config, say, progress or _no_progress, wait, pool)
        return _prepare_local(config, say, progress or _no_progress, wait, pool, mend)


def _prepare_local(
    config: DataConfig, say: Say, progress: Progress, wait: bool, pool: MakePool, mend: bool = False
) -> Dataset:
    """As `prepare_dataset`, of a dataset in a folder."""
    folder = Path(config.folder)
    with explain_os_errors(folder):
        wanted = content_settings(config)
        if exists(folder):
            dataset = Dataset.open(folder)
            _check_match(dataset, wanted, config, say, progress)
            if mend and is_list_damaged(dataset):
                _make_folder(folder / WORK_FOLDER)
                with _locked_folder(folder, say):
                    work = _Preparation(config, folder, wanted, say, progress, pool)
                    work.list_again(dataset)
            # left by a kill after the manifest
            shutil.rmtree(folder / WORK_FOLDER, ignore_errors=True)
            return dataset
        _make_folder(folder / WORK_FOLDER)
        with _locked_folder(folder, say, say if wait else None):
            if not exists(folder):
                _Preparation(config, folder, wanted, say, progress, pool).run()
            shutil.rmtree(folder / WORK_FOLDER, ignore_errors=True)
        return Dataset.open(folder)


def _prepare_remote(
    config: DataConfig, say: Say, progress: Progress, wait: bool, pool: MakePool
) -> Dataset:
    """As `prepare_dataset`, of a dataset with an address."""
    remote = RemoteDataset(config.folder, config)
    wanted = content_settings(config)
    local = config.model_copy(update={"folder": str(remote.prepare_folder)})
    if not remote.is_prepared():
        with explain_os_errors(remote.root):
            _make_folder(remote.claim_folder / WORK_FOLDER)
            with _locked_folder(remote.claim_folder, say, say if wait else None):
                make = partial(_prepare_local, local, say, progress, False, pool)
                upload_dataset(remote, make, say, progress, wait=wait)
    dataset = remote.open(ask=True)
    _check_match(dataset, wanted, config, say, progress)
    return dataset


def _check_match(
    dataset: Dataset, wanted: dict[str, Any], config: DataConfig, say: Say, progress: Progress
) -> None:
    """Raises DataError for a dataset that is not the run file's."""
    fetch = partial(fetch_source, config, say=say, progress=progress)
    check_settings_match(dataset, wanted, config, fetch)
    if changed := changed_code(dataset, wanted):
        say(
            f"{dataset.place} stays as it was prepared, though something of these stages has "
            f"changed since: {', '.join(changed)}. Name another data.folder to apply it"
        )
    if changed := changed_sources(config, dataset):
        say(
            f"{dataset.place} stays as it was prepared, though its sources have changed "
            f"({'; '.join(changed)}): name another data.folder to read them anew"
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
def _locked_folder(folder: Path, say: Say, wait: Say | None = None) -> Iterator[None]:
    """Hold a folder for one preparation; the kernel releases it when its process ends. If another
    process holds it, call `wait` with a message and wait for that process. On a file system without
    locks `say` gets a line, and the preparation continues without one."""
    with (folder / WORK_FOLDER / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait is None:
                raise DataError(
                    "another process is preparing this dataset",
                    where=str(folder),
                    remedy="wait for it, or name another data.folder",
                ) from None
            wait(f"another process is preparing the dataset in {folder}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            say(
                f"the file system of {folder} has no locks ({error.strerror}): let no second "
                "process prepare this dataset meanwhile"
            )
        yield


@dataclass
class _Preparation:
    """One preparation; the methods are its stages in order."""

    config: DataConfig
    folder: Path
    wanted: dict[str, Any]
    say: Say
    progress: Progress
    make_pool: MakePool

    def run(self) -> None:
        with self._begin() as pool:
            raw, found = self._scan(pool)
            rows, choice = self._choose(found)
            self._say_counts(choice)
            known = self._tokenizer(rows, choice)
            _give_memory_back()
            self._tokenise(pool, raw, choice, known)
        tokenizer = self.folder / WORK_FOLDER / "tokenizer.json"
        for line in self.chat.check(self.plans, self._path, tokenizer):
            self.say(line)
        self._join(found, rows, choice, known)

    def list_again(self, dataset: Dataset) -> None:
        """Write the list of what the stages left out of a dataset. Raises DataError if the sources
        or the stages do not give it any more."""
        with self._begin() as pool:
            _, found = self._scan(pool)
            _, choice = self._choose(found)
        made = self.stages.write_removed(self.folder, self.plans, found, choice)
        if made["stages"]["removed"] != dataset.manifest["stages"]["removed"]:
            (self.folder / REMOVED).unlink()
            raise DataError(
                "the list of what data.stages left out cannot be made again: the sources or the "
                "code of the stages have changed since",
                where=str(self.folder / REMOVED),
                remedy="train without it, or name another data.folder",
            )
        self.say(f"wrote {self.folder / REMOVED} again")

    def _begin(self) -> Pool:
        """Find the sources, keep the results of an earlier preparation that fit, and return what
        does the tasks."""
        self.chat = ChatPreparation(self.config)
        self.stages = StagePreparation(self.config, self._path)
        if self.config.tokenizer.place is not None:
            path = vocabulary.tokenizer_file(self.config.tokenizer.place)
            for line in check_tokenizer_files(path, vocabulary.load_tokenizer(path)):
                self.say(line)
        self.plans = self._plan()
        self.units = [unit for plan in self.plans for unit in plan.units]
        # Keep the unit results that exist, unless they are of other sources or settings.
        plan = {
            "format": self.chat.dataset_format,
            "settings": self.wanted,
            "stamps": [p.stamp for p in self.plans],
        }
        path = self.folder / WORK_FOLDER / "plan.json"
        if path.exists() and path.read_bytes() != canonical_json(plan):
            self.say("the sources or settings have changed: starting over")
            for stage in ("scan", "tokens", "lots"):
                shutil.rmtree(self.folder / WORK_FOLDER / stage, ignore_errors=True)
            (self.folder / WORK_FOLDER / "tokenizer.json").unlink(missing_ok=True)
        for stage in ("scan", "tokens", "lots"):
            (self.folder / WORK_FOLDER / stage).mkdir(exist_ok=True)
        write_atomic(path, [canonical_json(plan)])
        self.stages.open_files(self.folder / WORK_FOLDER / "tables", self.say)
        return self.make_pool(self._processes())

    def _choose(
        self, found: Sequence[DocumentRows]
    ) -> tuple[Sequence[DocumentRows], DocumentChoice]:
        """Return the rows of documents as the stages leave them, and those that stay."""
        rows = self.stages.read(self.units, found)
        try:
            return rows, choose_documents(
                rows,
                [unit.source for unit in self.units],
                [plan.name for plan in self.plans],
                self.config.validation_fraction,
                self.config.deduplicate,
                self.stages.removed(),
                self.stages.leave_out if self.stages else None,
            )
        except DataError:  # nothing is left of a source: what did it is named first
            for plan in self.plans:
                for line in (*self.stages.describe(plan), *self.chat.notes(plan, self._path)):
                    self.say(line)
            raise

    def _path(self, stage: str, unit: Unit) -> Path:
        return self.folder / WORK_FOLDER / stage / f"{unit.index:08d}"

    def _plan(self) -> list[SourcePlan]:
        plans: list[SourcePlan] = []
        sources = fetch_sources(self.config, self.say, self.progress)
        for index, source in enumerate(sources):
            first = sum(len(p.units) for p in plans)
            given = self.config.tokenizer.place
            features = FeatureFormat.of(self.config.features)
            plans.append(plan_source(source, index, first, self.chat.format, given, features))
        return plans

    def _processes(self) -> int:
        """Return 0 (right here) for a single unit, otherwise one process per usable core."""
        cores = self.config.processes or usable_cores()
        return 0 if len(self.units) == 1 else min(cores, len(self.units))

    def _run_stage(self, pool: Pool, what: str, stage: str, task: Callable[[Unit], Task]) -> None:
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

    def _scan(self, pool: Pool) -> tuple[list[str], Sequence[DocumentRows]]:
        limit = self.config.max_document_bytes
        self._run_stage(
            pool,
            "reading",
            "scan",
            lambda unit: {
                "do": "scan",
                "unit": unit.to_json(),
                "limit": limit,
                "stages": self.stages.of_source(unit.name),
                "out": str(self._path("scan", unit)),
            },
        )
        self._refuse_bad_files()
        found = [read_scan(self._path("scan", unit)) for unit in self.units]
        return [raw for raw, _ in found], UnitTables([rows for _, rows in found])

    def _refuse_bad_files(self) -> None:
        """Raises DataError that names all files that cannot be read, of all sources. Bad rows of
        sources that leave them out are counted."""
        problems: list[DataError] = []
        skipped: dict[str, list[DataError]] = {}
        for plan, source in zip(self.plans, self.config.sources, strict=True):
            if source.bad_rows == "skip":
                skipped[plan.name] = list(plan.refused)
            else:
                problems += plan.refused
        for unit in self.units:
            path = self._path("scan", unit)
            if refused := read_refused(path):
                if unit.skips_bad_rows:
                    skipped[unit.name] += refused
                    continue
                problems += refused
                path.unlink()  # what was wrong may be mended
        lines = [str(error) for errors in skipped.values() for error in errors]
        if skipped:
            text = "".join(f"{line}\n" for line in lines)
            write_atomic(self.folder / "skipped.txt", [text.encode()])
        for name, errors in skipped.items():
            if errors:
                self.say(
                    f"{name}: {len(errors):,} bad rows or files are left out (bad_rows: skip), "
                    f"the first: {errors[0].where}: {errors[0].message}"
                )
        if problems:
            raise join_errors(problems, self.folder / WORK_FOLDER / "refused.txt")

    def _say_counts(self, choice: DocumentChoice) -> None:
        for plan, count in zip(self.plans, choice.counts, strict=True):
            self.say(f"{plan.name}: {describe_count(count, self.config.deduplicate)}")
            for line in self.stages.describe(plan):
                self.say(line)
            if plan.unread:
                self.say(f"{plan.name}: {plan.unread}")
            for line in self.chat.notes(plan, self._path):
                self.say(line)
        for line in self.stages.describe_unmatched(self.plans):
            self.say(line)

    def _tokenizer(
        self, rows: Sequence[DocumentRows], choice: DocumentChoice
    ) -> vocabulary.Vocabulary:
        path = self.folder / WORK_FOLDER / "tokenizer.json"
        given = self.config.tokenizer.place
        if given is not None:
            write_atomic(path, [vocabulary.tokenizer_file(given).read_bytes()])
        elif not path.exists():
            masks = tokenizer_sample(rows, choice.lots, self.config.tokenizer.sample_bytes)
            size = sum(int(r[m, 2].sum()) for r, m in zip(rows, masks, strict=True))
            vocab = self.config.tokenizer.vocab_size
            self.say(f"training a byte-level BPE of {vocab:,} on {size / 1e6:.1f} MB")
            text = vocabulary.train_tokenizer(self._sample(masks), vocab)
            write_atomic(path, [text.encode()])
        tokenizer, described = vocabulary.load_tokenizer(path), path
        if given is not None:
            described = vocabulary.tokenizer_file(given)
            masks = tokenizer_sample(rows, choice.lots, PROBE_BYTES)
            for line in check_tokenizer(tokenizer, path, self._sample(masks), given):
                self.say(line)
            texts = [text[:COMPARED] for text in islice(self._sample(masks), COMPARED_TEXTS)]
            if line := compare_ids(described, vocabulary.load_tokenizer(path), texts):
                self.say(line)
        known = vocabulary.describe_tokenizer(tokenizer, described)
        if known.begin_id is not None:
            self.say(f"each document begins with token {known.begin_id}, as prompts will")
        return known

    def _sample(self, masks: list[np.ndarray[Any, np.dtype[np.bool_]]]) -> Iterator[str]:
        limit = self.config.max_document_bytes
        for unit, mask in zip(self.units, masks, strict=True):
            if mask.any():
                texts = read_unit(unit, limit, xxh3_128())
                edit = self.stages.editor(unit.name)
                chosen = (edit(t) for t, m in zip(islice(texts, len(mask)), mask, strict=True) if m)
                if unit.is_chat:
                    chosen = (
                        document.text
                        for text in chosen
                        for document in RowDocuments.decode(text).documents
                    )
                yield from chain.from_iterable(cut_text(text) for text in chosen)

    def _tokenise(
        self, pool: Pool, raw: list[str], choice: DocumentChoice, known: vocabulary.Vocabulary
    ) -> None:
        stop = sorted(self.chat.stop.values())

        def task(unit: Unit) -> Task:
            lots = self._path("lots", unit)
            write_atomic(lots, [choice.lots[unit.index].tobytes()])
            return {
                "do": "tokenise",
                "unit": unit.to_json(),
                "raw": raw[unit.index],
                "stages": self.stages.of_source(unit.name),
                "scan": str(self._path("scan", unit)),
                "limit": self.config.max_document_bytes,
                "lots": str(lots),
                "tokenizer": str(self.folder / WORK_FOLDER / "tokenizer.json"),
                "end": known.end_id,
                "begin": known.begin_id,
                "dtype": known.dtype,
                "stop": stop,
                "out": str(self._path("tokens", unit)),
            }

        self._run_stage(pool, "tokenising", "tokens", task)
        if ends := sum(read_ends(self._path("tokens", unit)) for unit in self.units):
            self.say(
                f"the text spells the end token {known.end_token!r} {ends:,} times; it was left "
                "out there"
            )

    def _join(
        self,
        found: Sequence[DocumentRows],
        rows: Sequence[DocumentRows],
        choice: DocumentChoice,
        known: vocabulary.Vocabulary,
    ) -> None:
        """found, rows: of the documents as the sources have them, and as the stages leave them."""
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
                    DOCUMENTS.get(source.rows, 1),
                )
                for i, (plan, source) in enumerate(
                    zip(self.plans, self.config.sources, strict=True)
                )
            ]
            for split in SPLITS
        }
        if not any(shards["validation"]):
            del shards["validation"]
        tokenizer = (self.folder / WORK_FOLDER / "tokenizer.json").read_bytes()
        write_atomic(self.folder / "tokenizer.json", [tokenizer], sync=True)
        places = with_paths_checksum(source_places(self.config))
        write_atomic(self.folder / SOURCES, [canonical_json(places)], sync=True)
        write_atomic(self.folder / RECIPE, [describe_recipe(self.config).encode()], sync=True)
        around = 1 if known.begin_id is None else 2
        # Per split and source. around: tokens of a document that are no text.
        sizes: dict[str, list[SourceSize]] = {}
        for lot, split in enumerate(SPLITS, start=1):
            for plan, one in zip(self.plans, shards.get(split, ()), strict=False):
                size = sum(
                    int(rows[u.index][choice.lots[u.index] == lot, 2].sum()) for u in plan.units
                )
                tokens, documents = sum(s.tokens for s in one), sum(s.documents for s in one)
                text = tokens - around * documents
                sizes.setdefault(split, []).append(SourceSize(documents, tokens, text, size))
        splits = self.chat.split_counts(sizes, self.plans, self._path)
        content = {
            "format": self.chat.dataset_format,
            "settings": self.wanted,
            "sources": _source_lineage(self.plans, self.wanted["sources"], found, choice),
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
            "baselines": None
            if self.chat.format is not None or self.config.features.is_on
            else _baselines(self.folder, shards, splits, known),
        } | self.chat.store_template(self.folder)
        content |= self.stages.write_removed(self.folder, self.plans, found, choice)
        manifest = with_version(content)
        write_atomic(self.folder / MANIFEST, [canonical_json(manifest)], sync=True)
        total = splits["train"]["tokens"]
        self.say(f"dataset {manifest['version']}: {total:,} training tokens in {self.folder}")


def _source_lineage(
    plans: Sequence[SourcePlan],
    wanted: Sequence[dict[str, Any]],
    rows: Sequence[DocumentRows],
    choice: DocumentChoice,
) -> list[dict[str, Any]]:
    """Return the origin of the tokens: each source with a hash of its documents' hashes and
    sizes, in order. The hash does not depend on how the source was cut into units."""
    out = []
    for plan, settings, count in zip(plans, wanted, choice.counts, strict=True):
        digest = checksum(b"".join(rows[u.index].tobytes() for u in plan.units))
        found = {"files": plan.files, "bytes": plan.bytes, "xxh3": digest}
        out.append({**settings, **found, **count.to_json()})
    return out


def join_errors(problems: list[DataError], rest: Path) -> DataError:
    """One error for all files that cannot be read, each with its place. `rest` is a file that
    names them if they are many."""
    if len(problems) == 1:
        return problems[0]
    named = [str(problem) for problem in problems[:NAMED_FILES]]
    more = len(problems) - len(named)
    if more:
        write_atomic(rest, ["".join(f"{problem}\n" for problem in problems).encode()])
        named.append(f"and {more:,} more, all of them in {rest}")
    text = "\n".join([f"{len(problems):,} files cannot be read:", *named])
    return DataError(text)


def _give_memory_back() -> None:
    """Give memory that is free back to the system. glibc keeps it otherwise, next to the memory of
    the processes that tokenise."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


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
        (tokens for stream in train for tokens in stream.read_shards()),
        validation.read(0, MAX_TOKENS),
        known.size,
        known.end_id,
        per_byte,
    )
