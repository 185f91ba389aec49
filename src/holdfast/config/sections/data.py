"""The section `data:` of a run file: sources of text, and how it becomes samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Literal

from pydantic import Field, PrivateAttr

from holdfast.config.sections.base import Branch, InPlace, Section
from holdfast.config.sections.features import MEDIA_KINDS, FeaturesConfig
from holdfast.config.sections.stages import JOINS, StageConfig

CHAT_KINDS = ("jsonl", "parquet", "huggingface")
PREFERENCE_ROWS = ("preference", "unpaired_preference")
MAX_EXACT_BLOCK = 100_000
"""Samples after which the pattern of `data.mix` repeats, at most."""


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers with the ratio of weights; of weights of 0, zeros."""
    fractions = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(each.denominator for each in fractions))
    whole = [int(each * scale) for each in fractions]
    return [each // max(1, gcd(*whole)) for each in whole]


class SourceConfig(Section):
    """One source of documents. `path` may be a file, a folder or a glob."""

    kind: Literal[
        "python-stdlib",
        "text",
        "jsonl",
        "csv",
        "parquet",
        "arrow",
        "huggingface",
        "webdataset",
        "tfrecord",
        "mds",
        "warc",
        "lance",
        "megatron",
        "files",
    ] = "python-stdlib"
    """python-stdlib: this Python's own library, without its tests; the other kinds:
    docs/guide/data.md"""
    name: str | None = Field(None, description="name in the mixture; the kind if left out")
    path: str | None = None
    """file, folder or glob; huggingface: folder or dataset's name"""
    field: str = Field("text", description="field of JSON, or column, that holds the text")
    media: str = ""
    """column, or ending in tar files, of the image or recording; empty: image or audio, and in tar
    files any known ending"""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """skip: a row or file that cannot be read is left out, counted, and named in skipped.txt
    of the dataset's folder"""
    rows: Literal[
        "text", "messages", "sharegpt", "instruction", "prompt", "preference", "unpaired_preference"
    ] = "text"
    """text: a row's text is in `field`; the other forms are chat data, with loss on the replies:
    docs/guide/fine-tuning.md, and of the last two docs/guide/preference-data.md"""
    split: str = Field("train", description="split of a Hugging Face dataset")
    weight: float = Field(1.0, gt=0, description="share of the samples, relative to other sources")
    at_end: Literal["repeat", "leave", "stop"] = "repeat"
    """after `passes` passes over the source. repeat: the next pass begins. leave: its share goes to
    the other sources. stop: the run ends before the first step that needs another sample of it"""
    passes: int = Field(1, ge=1, description="passes before at_end leave or stop")
    _place: str | None = PrivateAttr(None)

    @property
    def place(self) -> str | None:
        """The place of `path` (`config.loading.paths`); the path itself without a run file."""
        return self._place or self.path

    def at(self, place: str | None) -> SourceConfig:
        located = self.model_copy()
        located._place = place
        return located

    def broken_rules(self) -> Iterator[str]:
        if self.path is None and self.kind != "python-stdlib":
            what = "a data set's name" if self.kind == "huggingface" else "a file, folder or glob"
            yield f"path is missing for a {self.kind} source: use {what}"
        if self.is_chat and self.kind not in CHAT_KINDS:
            yield (
                f"rows: {self.rows} cannot be read from kind: {self.kind}: use one of "
                f"{', '.join(CHAT_KINDS)}"
            )

        if self.at_end == "repeat" and self.passes > 1:
            yield "passes has no effect with at_end repeat: use at_end: leave, or at_end: stop"

    @property
    def is_chat(self) -> bool:
        return self.rows != "text"

    @property
    def mix_name(self) -> str:
        return self.name or self.kind


class MixStage(Section):
    """From step `from_step` on, other weights of sources."""

    from_step: int = Field(ge=1, description="must rise from item to item")
    weights: dict[str, float] = Field(min_length=1)
    """source's name -> share of the samples, relative to the rest; 0: none. A source that is not
    named keeps its weight"""

    def broken_rules(self) -> Iterator[str]:
        for name, weight in self.weights.items():
            if weight < 0:
                yield f"weights.{name} {weight:g} is negative: use 0 or more"


class CurriculumConfig(Section):
    """The order in which the samples of a source are read (docs/guide/data.md)."""

    by: Literal["none", "length", "score"] = "none"
    """none: shuffled. length: by the tokens of documents, the shortest first; packed rows of chats
    by the mean of a sample. score: by the number of the stage of kind score, the lowest first"""
    descending: bool = Field(False, description="the longest, or the highest score, first")
    passes: int = Field(1, ge=1, description="passes over a source in this order; then shuffled")
    window: int = Field(1, ge=1, description="samples in a row that are shuffled; 1: none are")

    @property
    def suffix(self) -> str:
        """What tells samples of other orders apart, in the name of a file."""
        return "" if self.by == "none" else f"-{self.by}{'-down' if self.descending else ''}"

    def broken_rules(self) -> Iterator[str]:
        for name in ("descending", "passes", "window"):
            if self.by == "none" and getattr(self, name) != type(self).model_fields[name].default:
                yield f"{name} has no effect with by none: use by: length, or by: score"


class TokenizerConfig(Section):
    """A byte-level BPE trained on the corpus, or any tokenizer.json."""

    path: str | None = None
    """path of a tokenizer.json, or of its folder; none: train one"""
    vocab_size: int = Field(4096, ge=257, description="tokens of the trained byte-level BPE")
    sample_bytes: int = Field(4_000_000, ge=1, description="text the BPE is trained on")
    _place: str | None = PrivateAttr(None)

    @property
    def place(self) -> str | None:
        """The place of `path` (`config.loading.paths`); the path itself without a run file."""
        return self._place or self.path

    def at(self, place: str | None) -> TokenizerConfig:
        located = self.model_copy()
        located._place = place
        return located


class ChatConfig(Section):
    """How rows of messages become text, and which of it carries loss."""

    template: Literal["folder", "chatml", "llama3", "alpaca"] = "folder"
    """folder: the one next to the tokenizer; the other values: one by name"""
    template_file: str | None = None
    """path of a jinja file; none: what `template` says"""
    template_name: str | None = None
    """which template of the folder, if it has several by name; none: default, and tool_use for rows
    with tools"""
    template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """more variables of the template, as enable_thinking: false; a row's chat_template_kwargs count
    before"""
    train_on: tuple[str, ...] = Field(("assistant",), min_length=1)
    """roles whose messages carry loss"""
    weights: bool = False
    """messages may have weights of hundredths, from 0 to 2.54; false: only 0 and 1"""
    long_rows: Literal["leave_out", "cut"] = "leave_out"
    """what happens to a row that is longer than `data.sequence_length`"""


class DataConfig(Section):
    folder: InPlace[str] = "datasets/python-stdlib"
    """folder of the prepared dataset, or an address such as s3://bucket/prefix
    (docs/guide/data.md)"""
    cache: InPlace[str] = ""
    """folder of this node for datasets with an address; empty: holdfast/data in $XDG_CACHE_HOME or
    ~/.cache"""
    cache_gb: InPlace[float] = Field(100, gt=0)
    """most that `cache` holds; shards that were not used for the longest time go"""
    sources: tuple[SourceConfig, ...] = Field((SourceConfig(),), min_length=1)
    mix: Branch[tuple[MixStage, ...]] = ()
    """weights of sources that change at a step (docs/guide/data.md)"""
    curriculum: CurriculumConfig = CurriculumConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    chat: ChatConfig = ChatConfig()
    sequence_length: int = Field(256, ge=2, description="tokens of one sample")
    attention: Branch[Literal["full", "document"]] = "full"
    """document: a token attends to its own document only, without a mask of the row
    (docs/guide/models.md)"""
    validation_fraction: float = Field(0.01, ge=0, lt=1, description="share of documents, by hash")
    deduplicate: bool | Literal["within_source"] = True
    """true: a document that repeats an earlier one of any source is left out; within_source: of its
    own source; false: no document"""
    stages: tuple[StageConfig, ...] = ()
    """what is left out of the sources, and changed in them, in this order
    (docs/guide/data-stages.md)"""
    features: FeaturesConfig = FeaturesConfig()
    max_document_bytes: int = Field(16 * 2**20, ge=1)
    """a longer file or line is an error that names it"""
    shard_tokens: int = Field(8_000_000, ge=1024, description="tokens of one shard file")
    processes: InPlace[int] = Field(0, ge=0)
    """processes of `holdfast data prepare`; 0: one per core"""

    @property
    def has_chat(self) -> bool:
        return any(source.is_chat for source in self.sources)

    @property
    def has_preferences(self) -> bool:
        return any(source.rows in PREFERENCE_ROWS for source in self.sources)

    def broken_rules(self) -> Iterator[str]:
        yield from self._broken_stages()
        yield from self._broken_mix()
        yield from self._broken_features()
        for index, source in enumerate(self.sources):
            if source.kind == "megatron" and self.tokenizer.path is None:
                yield (
                    f"sources.{index} has tokens of a tokenizer, and none is named: use "
                    "tokenizer.path"
                )
        if not self.has_chat:
            return
        if self.attention != "document":
            yield (
                "attention full lets a conversation see the one packed before it: "
                "use attention: document"
            )
        if self.has_preferences and (len({source.rows for source in self.sources}) > 1):
            forms = ", ".join(sorted({source.rows for source in self.sources}))
            yield (
                f"sources[].rows are {forms}: rows of preferences stand alone: use one form for "
                "all sources"
            )
        if self.has_preferences and self.chat.weights:
            yield "chat.weights true has no meaning for rows of preferences: leave it out"
        if self.tokenizer.path is None:
            yield "chat data needs the tokenizer of a model: use tokenizer.path, or model.from"

    def mix_weights(self) -> list[dict[str, float]]:
        """The weight of each source by its name: that of `sources`, then those of each stage of
        `mix`."""
        found = [{source.mix_name: source.weight for source in self.sources}]
        for stage in self.mix:
            found.append({**found[-1], **stage.weights})
        return found

    def _broken_mix(self) -> Iterator[str]:
        names = [source.mix_name for source in self.sources]
        for index, stage in enumerate(self.mix):
            if unknown := sorted(set(stage.weights) - set(names)):
                yield f"mix.{index}.weights has {unknown[0]}, no source: use {', '.join(names)}"
            if index and stage.from_step <= (before := self.mix[index - 1].from_step):
                yield (
                    f"mix.{index}.from_step {stage.from_step} must be above the one before it: "
                    f"use {before + 1} or more"
                )
            weights = list(self.mix_weights()[index + 1].values())
            if not any(weights):
                yield f"mix.{index}.weights are all 0: use a weight above 0 for one source"
            elif sum(whole_weights(weights)) > MAX_EXACT_BLOCK:
                yield (
                    f"mix.{index}.weights have too many digits: use whole numbers with a sum of at "
                    f"most {MAX_EXACT_BLOCK}"
                )

    def _broken_features(self) -> Iterator[str]:
        for index, source in enumerate(self.sources):
            if not self.features.is_on:
                if source.kind == "files":
                    yield (
                        f"sources.{index}.kind files reads images and recordings: use "
                        "features.kind: patches, or log_mel; or kind: text"
                    )
                continue
            if source.kind not in MEDIA_KINDS:
                yield (
                    f"sources.{index}.kind {source.kind} has no images and no recordings for "
                    f"features.kind {self.features.kind}: use {', '.join(MEDIA_KINDS)}"
                )
            if source.is_chat:
                yield (
                    f"sources.{index}.rows {source.rows} has texts alone, and features.kind is "
                    f"{self.features.kind}: use rows: text"
                )
        if self.features.is_on and self.stages:
            yield (
                f"stages judges texts, and features.kind {self.features.kind} would lose its "
                "images and recordings: remove it"
            )
        if self.features.is_on and self.curriculum.by != "none":
            yield (
                f"curriculum.by {self.curriculum.by} orders texts, and features.kind is "
                f"{self.features.kind}: remove it"
            )
        if self.features.is_on and self.attention != "full":
            yield (
                f"attention {self.attention} has no effect, as a sample of features.kind "
                f"{self.features.kind} is one document: remove it"
            )

    def _broken_stages(self) -> Iterator[str]:
        names = [source.mix_name for source in self.sources]
        for index, stage in enumerate(self.stages):
            if unknown := sorted(set(stage.sources) - set(names)):
                yield (
                    f"stages.{index}.sources has {unknown[0]}, no source: use [{', '.join(names)}]"
                )
            rest = [later.kind for later in self.stages[index + 1 :]]
            if stage.kind in JOINS and (stage.kind in rest or not set(rest) <= set(JOINS)):
                yield (
                    f"stages.{index} is {stage.kind}, which compares what is left: remove it, or "
                    "write it last"
                )
        for name in names:
            count = sum(s.kind == "score" and name in (s.sources or names) for s in self.stages)
            if count > 1:
                yield f"stages has {count} of kind score for {name}: use one for each source"
            if not count and self.curriculum.by == "score":
                yield (
                    f"curriculum.by score needs a stage of kind score for {name}: use stages "
                    "[{kind: score, texts: [{path: good.txt}]}]"
                )
        if self.stages and self.has_chat:
            yield "stages judges texts, and chat data has none: remove it"
