"""Models of transformers that read sound or images, trained on samples of tar shards.

`model: {from: FOLDER, code: transformers}` with `task.args.shards` trains one of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from holdfast.data.read.tar_shards import SHARDS_KEY, TarShards
from holdfast.errors import TaskError
from holdfast.tasks.task.task import Batch
from holdfast.tasks.transformers.folder_model import FolderModel, token_losses, transformers_package
from holdfast.tasks.transformers.sample_batch import padded_batch, read_image, read_texts, read_wav
from holdfast.training.engine.objective import IGNORED_TARGET

_TEXTS = (".txt", ".json")
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".ppm")
LABELS = "labels"


class ShardSamples:
    """Samples of shards, made into tensors on request."""

    def __init__(
        self, shards: TarShards, make: Callable[[Mapping[str, bytes], str], dict[str, Tensor]]
    ) -> None:
        self._shards, self._make, self.version = shards, make, shards.version

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, index: int, /) -> Mapping[str, Tensor]:
        return self._make(self._shards.read(index), self._shards.place(index))


class ShardModel(FolderModel):
    """A model that learns from shards.

    shards, validation: folders of tar files.
    """

    parts: ClassVar[tuple[tuple[str, ...], ...]]  # of a sample (`TarShards`)

    def __init__(
        self,
        folder: str,
        shards: str,
        validation: str = "",
        *,
        pretrained: bool = True,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(folder, pretrained=pretrained, trust_remote_code=trust_remote_code)
        self._shards = TarShards(shards, self.parts)
        self._validation = TarShards(validation, self.parts) if validation else None

    @abstractmethod
    def sample(self, parts: Mapping[str, bytes], place: str) -> dict[str, Tensor]:
        """Make the tensors of a sample, `labels` among them. Raises TaskError."""

    def data(self) -> ShardSamples:
        return ShardSamples(self._shards, self.sample)

    def validation(self) -> ShardSamples | None:
        return None if self._validation is None else ShardSamples(self._validation, self.sample)

    def start_notes(self) -> Sequence[str]:
        return self._shards.notes()

    def weight(self, batch: Batch) -> float:
        """The targets with a loss."""
        return float((batch[LABELS] != IGNORED_TARGET).sum())

    @cached_property
    def _tokenizer(self) -> Any:
        return self._of_folder("AutoTokenizer")

    def _of_folder(self, auto: str) -> Any:
        """Raises TaskError if the folder lacks it."""
        try:
            return getattr(transformers_package(), auto).from_pretrained(
                self.folder, **self._origin()
            )
        except (OSError, ValueError, ImportError) as error:
            raise TaskError(
                f"{auto} of transformers finds none in {self.folder} "
                f"({str(error).strip().splitlines()[0]})",
                where="task.args.folder",
                remedy="fetch the complete folder",
            ) from None

    def _ended(self, ids: Sequence[int]) -> list[int]:
        """The tokens of a text, with the end token last."""
        end = self._tokenizer.eos_token_id
        return [*ids] if end is None or [*ids[-1:]] == [end] else [*ids, end]


class Speech(ShardModel):
    """A speech model of the shape of Whisper: `AutoModelForSpeechSeq2Seq` reads a recording and
    writes its text. A sample is a .wav and a .txt."""

    auto: ClassVar[str] = "AutoModelForSpeechSeq2Seq"
    parts: ClassVar[tuple[tuple[str, ...], ...]] = ((".wav",), (".txt",))

    def check_config(self, config: Any) -> None:
        if not getattr(config, "is_encoder_decoder", False):
            raise _other_model(config, "no encoder-decoder, as speech models are")

    def sample(self, parts: Mapping[str, bytes], place: str) -> dict[str, Tensor]:
        extractor = self._extractor
        rate = int(extractor.sampling_rate)
        sound = read_wav(parts[".wav"], rate, place)
        longest = getattr(extractor, "n_samples", None)
        if longest and len(sound) > longest:
            raise TaskError(
                f"{place} has {len(sound) / rate:.1f} s, and the model hears {longest / rate:.1f}",
                where=SHARDS_KEY,
                remedy="cut the recording into shorter ones",
            )
        found = extractor(sound, sampling_rate=rate, return_tensors="pt")
        _, text = read_texts(parts, place)
        ids = self._ended(self._tokenizer(text).input_ids)
        start = self._start
        ids = ids[1:] if len(ids) > 1 and ids[0] == start else ids
        longest = getattr(self._config, "max_target_positions", None)
        if longest and len(ids) > longest:
            raise TaskError(
                f"{place} has a text of {len(ids)} tokens, and the model writes {longest}",
                where=SHARDS_KEY,
                remedy="cut the recording into shorter ones",
            )
        targets = torch.tensor([start, *ids])
        tensors = {name: value[0] for name, value in found.items()}
        return {**tensors, "decoder_input_ids": targets[:-1], LABELS: targets[1:]}

    def collate(self, items: Sequence[Mapping[str, Any]]) -> Batch:
        return padded_batch(items, {LABELS: IGNORED_TARGET, "decoder_input_ids": self._start})

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        given = {name: value for name, value in batch.items() if name != LABELS}
        return token_losses(model(**given, use_cache=False).logits, batch[LABELS])

    @cached_property
    def _extractor(self) -> Any:
        return self._of_folder("AutoFeatureExtractor")

    @property
    def _start(self) -> int:
        return int(self._config.decoder_start_token_id)


class VisionLanguage(ShardModel):
    """A model that reads an image and a prompt and writes a completion:
    `AutoModelForImageTextToText`. A sample is an image and a .txt, which is the completion, or a
    .json with `prompt` and `completion`."""

    auto: ClassVar[str] = "AutoModelForImageTextToText"
    parts: ClassVar[tuple[tuple[str, ...], ...]] = (_IMAGES, _TEXTS)

    def check_config(self, config: Any) -> None:
        if getattr(config, "vision_config", None) is None:
            raise _other_model(config, "no model of images: its config has no vision_config")

    def sample(self, parts: Mapping[str, bytes], place: str) -> dict[str, Tensor]:
        name = next(name for name in _IMAGES if name in parts)
        image = read_image(parts[name], place)
        prompt, completion = read_texts(parts, place)
        found = self._processor(images=[image], text=[self._prompt(prompt)], return_tensors="pt")
        before = found.pop("input_ids")[0]
        found.pop("attention_mask", None)
        ids = self._tokenizer(completion, add_special_tokens=False).input_ids
        added = torch.tensor(self._ended(ids))
        if joined := [name for name, value in found.items() if len(value) != 1]:
            raise TaskError(
                f"the processor in {self.folder} gives {joined[0]} without a row for each sample",
                where="task.args.folder",
                remedy="write a task of your own for this model (docs/guide/python.md)",
            )
        tensors = {name: value[0] for name, value in found.items()}
        tokens = torch.cat([before, added])
        labels = torch.cat([torch.full_like(before, IGNORED_TARGET), added])
        mask = torch.ones_like(tokens)
        return {**tensors, "input_ids": tokens, "attention_mask": mask, LABELS: labels}

    def collate(self, items: Sequence[Mapping[str, Any]]) -> Batch:
        pad = self._tokenizer.pad_token_id
        fill = {LABELS: IGNORED_TARGET, "input_ids": 0 if pad is None else pad}
        return padded_batch(items, fill)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        given = {name: value for name, value in batch.items() if name != LABELS}
        logits = model(**given, use_cache=False).logits
        return token_losses(logits[:, :-1], batch[LABELS][:, 1:])

    def _prompt(self, text: str) -> str:
        """By the template of the folder, or the mark of the image and the text."""
        processor = self._processor
        if processor.chat_template is None:
            return f"{processor.image_token}{text}"
        content = [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
        message = [{"role": "user", "content": content}]
        rendered: str = processor.apply_chat_template(message, add_generation_prompt=True)
        return rendered

    @cached_property
    def _processor(self) -> Any:
        return self._of_folder("AutoProcessor")


def _other_model(config: Any, what: str) -> TaskError:
    return TaskError(
        f"{config.model_type} is {what}",
        where="task.args.folder",
        remedy="name another folder, or write a task of your own (docs/guide/python.md)",
    )
