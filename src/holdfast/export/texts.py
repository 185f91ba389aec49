"""Texts of a trained model, for the commands that sample: continuations, and replies in a chat."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.huggingface.folder import CONFIG, end_ids
from holdfast.config.loading.model_from import TRANSFORMERS_TASK
from holdfast.config.sections.data import DataConfig, SourceConfig
from holdfast.config.sections.task import refuse_task
from holdfast.data.read.chat_format import read_chat_format
from holdfast.data.read.chat_render import ChatTemplate
from holdfast.data.read.chat_templates import TEMPLATE_FILE
from holdfast.data.read.vocabulary import (
    describe_tokenizer,
    load_tokenizer,
    stop_tokens,
    tokenizer_file,
)
from holdfast.data.stream.dataset import exists, read_manifest
from holdfast.errors import DataError
from holdfast.export.weights import (
    dataset_tokens,
    folder_decoder,
    load_decoder,
    settings_folder,
    with_checkpoint,
)
from holdfast.launch.run.runs import RESOLVED_FILE, Run, open_run, with_base

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from holdfast.model.decoder import Decoder
    from holdfast.model.generate import OpenSession

Message = Mapping[str, str]  # role and content
_HALF_CHARACTER = "\ufffd"  # what a decoder of bytes gives for a character that is not complete


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling: at most `tokens`, fewer if the model ends its document."""

    tokens: int = 120
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0

    def refuse(self) -> None:
        """Raises UserError for settings that are out of range."""
        from holdfast.model.generate import refuse_sampling

        refuse_sampling(self.temperature, self.top_p)


class TextModel:
    """A model with its tokenizer.

    Args:
        limit: most tokens of a text; None: not known.
        begin: the token before a text that no template writes; None: none.
        stop: tokens at which a text ends.
        read_template: returns the chat template. Raises DataError if there is none.
        data: names the tokenizer and the template, for readers of prompts.
    """

    def __init__(
        self,
        model: Decoder | OpenSession,
        limit: int | None,
        tokenizer: Tokenizer,
        begin: int | None,
        stop: Collection[int],
        read_template: Callable[[], ChatTemplate],
        data: DataConfig,
    ):
        self.model, self.limit, self.tokenizer = model, limit, tokenizer
        self.begin, self.stop, self.data = begin, frozenset(stop), data
        self._read_template = read_template
        self._template: ChatTemplate | None = None

    def continue_text(self, prompt: str, how: Sampling) -> str:
        """Return what the model adds to a text, up to the end of the document."""
        return self._continue(self.text_ids(prompt), how)

    def text_ids(self, prompt: str) -> list[int]:
        """Return the tokens of a text, as the model reads them."""
        self.tokenizer.encode_special_tokens = True
        ids = self._encode(prompt)
        return ids if self.begin is None else [self.begin, *ids]

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of messages, up to where the reply begins. Raises UserError."""
        rendered = self.require_template().render(messages, "the prompt", begins_reply=True).text
        self.tokenizer.encode_special_tokens = False  # the template writes special tokens
        return self._encode(rendered)

    def reply(
        self,
        messages: Sequence[Message],
        how: Sampling,
        take: Callable[[str], None] | None = None,
        shorten: bool = False,
    ) -> str:
        """Return the reply to the last message. Raises UserError if the template fails, or if the
        text would be longer than the model allows.

        Args:
            take: is called with each piece of the reply at once.
            shorten: give the reply as many tokens as are left, if `how` asks for more.
        """
        ids = self.chat_ids(messages)
        left = how.tokens if self.limit is None else self.limit - len(ids)
        if shorten and left < 1:
            raise DataError(
                f"the conversation has {len(ids)} tokens, and the model {self.limit} positions",
                remedy="begin a new one with /reset, or send a shorter message",
            )
        if shorten and left < how.tokens:
            how = replace(how, tokens=left)
        return self._continue(ids, how, take)

    def require_template(self) -> ChatTemplate:
        """Return the chat template. Raises DataError if there is none."""
        if self._template is None:
            self._template = self._read_template()
        return self._template

    def _encode(self, text: str) -> list[int]:
        if any(0xD800 <= ord(c) < 0xE000 for c in text):  # how Python carries other bytes
            raise DataError(
                "the prompt is not UTF-8 text",
                where=repr(text),
                remedy="give it in the terminal's encoding, UTF-8",
            )
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _continue(
        self, ids: Sequence[int], how: Sampling, take: Callable[[str], None] | None = None
    ) -> str:
        from holdfast.model.generate import continue_tokens

        stream = _TextStream(self.tokenizer, self.stop, take)
        continue_tokens(
            self.model,
            ids,
            how.tokens,
            temperature=how.temperature,
            top_p=how.top_p,
            seed=how.seed,
            stop=self.stop,
            on_token=stream.add,
        )
        return stream.end()


class _TextStream:
    """Tokens as text. A character is given when all of its bytes are there."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Collection[int], take: Callable[[str], None] | None
    ):
        self._tokenizer, self._stop, self._take = tokenizer, stop, take
        self._tokens: list[int] = []
        self._length = 0  # characters that `take` has

    def add(self, token: int) -> None:
        """Take the next token."""
        if token in self._stop:
            return
        self._tokens.append(token)
        if self._take is not None:
            text = self._text()
            if not text.endswith(_HALF_CHARACTER):
                self._give(text)

    def end(self) -> str:
        """Return the complete text."""
        text = self._text()
        self._give(text)
        return text

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=False))

    def _give(self, text: str) -> None:
        if self._take is not None and len(text) > self._length:
            self._take(text[self._length :])
            self._length = len(text)


@dataclass(frozen=True)
class Opened:
    """A text model, and where its weights are from."""

    texts: TextModel
    about: dict[str, int | str]  # for JSON
    source: str  # for people
    settings: Path  # folder with the settings of the weights that it began with


def is_model_folder(path: Path) -> bool:
    """Return True for the folder of a model in Hugging Face form, False for a run."""
    return (path / CONFIG).is_file() and not (path / RESOLVED_FILE).exists()


def open_texts(
    path: Path, step: int | None, base: Path | None, say: Callable[[str], None]
) -> Opened:
    """Open the folder of a model, or the checkpoint of `step` of a run; the newest intact one if
    `step` is None. base: folder of a lora run's frozen weights, if it has moved."""
    if is_model_folder(path):
        return Opened(open_folder(path), {"folder": str(path)}, f"weights of {path}", path)
    run = with_base(open_run(path), base)
    checkpoint, texts = with_checkpoint(run, step, lambda chosen: open_checkpoint(run, chosen), say)
    about: dict[str, int | str] = {"step": checkpoint.step}
    return Opened(texts, about, f"checkpoint of step {checkpoint.step}", settings_folder(run))


def open_checkpoint(run: Run, checkpoint: Checkpoint) -> TextModel:
    """Open a checkpoint of a run. Raises UserError for a task that has no text."""
    is_theirs = run.config.task.name == TRANSFORMERS_TASK
    if not is_theirs:
        refuse_task(run.config.task, "generating text")
    path = run.dataset_files / "tokenizer.json"
    if not path.is_file():
        raise DataError(
            "the run's tokenizer is not there",
            where=str(path),
            remedy="remove the folder if it is there, and prepare the dataset again: "
            "holdfast data prepare RUN.yaml",
        )
    tokenizer = load_tokenizer(path)
    special = dataset_tokens(run.dataset_files, tokenizer)
    stop = {special.end_id} | end_ids(settings_folder(run))
    if run.config.rollout.is_on:  # prompts in place of a dataset, with the tokenizer of a model
        stop |= set(stop_tokens(tokenizer, path).values())

    def read_template() -> ChatTemplate:
        folder = run.dataset_files
        if run.config.rollout.is_on:
            return _read_template(run.config.data, path)
        known = read_manifest(folder).get("chat")
        if known is None:
            raise DataError(
                "the run was not trained on chat data with a template",
                where=str(folder),
                remedy="use holdfast generate and leave out --chat",
            )
        return ChatTemplate((folder / TEMPLATE_FILE).read_text("utf-8"), known["variables"])

    begin, data = special.begin_id, _prompt_data(run, path)
    if not is_theirs:
        model = load_decoder(run, checkpoint)
        limit = model.config.max_position
        return TextModel(model, limit, tokenizer, begin, stop, read_template, data)
    from holdfast.export.adapters import run_weights
    from holdfast.tasks.transformers.huggingface_export import open_causal_lm

    weights = run_weights(run, checkpoint)
    opened = open_causal_lm(run.config.task, weights.names, weights.whole)
    return TextModel(opened, opened.limit, tokenizer, begin, stop, read_template, data)


def _prompt_data(run: Run, tokenizer: Path) -> DataConfig:
    """The tokenizer and the chat template of a run, for readers of prompts."""
    if run.config.rollout.is_on:
        return run.config.data.model_copy(
            update={"tokenizer": run.config.data.tokenizer.at(str(tokenizer))}
        )
    chat = read_manifest(run.dataset_files).get("chat") if exists(run.dataset_files) else None
    kwargs = {} if chat is None else {"chat": {"template_kwargs": chat["variables"]}}
    return DataConfig.model_validate({"tokenizer": {"path": str(tokenizer)}, **kwargs})


def open_folder(folder: Path) -> TextModel:
    """Open the folder of a model in Hugging Face form. Raises UserError for one that the built-in
    decoder cannot read."""
    path = tokenizer_file(folder)
    tokenizer = load_tokenizer(path)

    model, stop = folder_decoder(folder), stop_tokens(tokenizer, path).values()
    begin, limit = describe_tokenizer(tokenizer, path).begin_id, model.config.max_position
    sources = [{"kind": "jsonl", "path": "texts"}]
    data = DataConfig.model_validate({"sources": sources, "tokenizer": {"path": str(path)}})
    template = partial(_read_template, data, path)
    return TextModel(model, limit, tokenizer, begin, stop, template, data)


def _read_template(data: DataConfig, tokenizer: Path) -> ChatTemplate:
    """Read the chat template that `data` names, or that lies next to a tokenizer.json."""
    rows = SourceConfig(kind="jsonl", path="rows", rows="messages")
    located = data.tokenizer.at(str(tokenizer))
    form = read_chat_format(data.model_copy(update={"sources": (rows,), "tokenizer": located}))
    assert form is not None, "the rows are messages"
    return ChatTemplate(form.template, dict(form.variables))


def continuations(
    run: Run, checkpoint: Checkpoint, prompts: Sequence[str], how: Sampling
) -> list[str]:
    """Return the model's text after each prompt, up to the end of the document."""
    texts = open_checkpoint(run, checkpoint)
    return [texts.continue_text(prompt, how) for prompt in prompts]
