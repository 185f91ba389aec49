"""A trained model as tasks see it: log-probabilities of tokens, and the likeliest replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.export.texts import TextModel, is_model_folder, open_checkpoint, open_folder
from holdfast.export.weights import with_checkpoint
from holdfast.launch.run.runs import Run, open_run, with_base
from holdfast.model.decoder import Decoder
from holdfast.model.generate import continue_tokens
from holdfast.rollout.decode.policy import PolicyDecoder
from holdfast.rollout.messages import CompletionKey, CompletionRequest, Sampling
from holdfast.tasks.transformers.huggingface_export import OpenCausalLM

_SLOTS = 16  # replies that are written at a time


@dataclass(frozen=True)
class EvaluatedModel:
    """A model, and which checkpoint it is of."""

    texts: TextModel
    source: str  # for people
    run: Run | None = None  # None: the folder of a model
    checkpoint: Checkpoint | None = None

    @property
    def limit(self) -> int:
        """Positions that the model has."""
        return self.texts.limit or 1 << 20

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Return logits after each token, computed alone. [S, V]"""
        model, tokens = self.texts.model, torch.tensor([list(ids)])
        if isinstance(model, Decoder):
            return model(tokens)[0].float()  # type: ignore[no-any-return]
        assert isinstance(model, OpenCausalLM)
        return model.logits(tokens)[0].float()

    def logps(self, ids: Sequence[int], start: int) -> tuple[Tensor, bool]:
        """Return the log-probability of each token from number `start` >= 1 on, and whether each
        of them is the likeliest."""
        rows = self.logits(ids[:-1])[start - 1 :]
        chosen = torch.tensor(list(ids[start:]))
        logps = rows.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        return logps, bool((rows.argmax(-1) == chosen).all())

    def text_loss(self, ids: Sequence[int]) -> float:
        """Return the negative log-likelihood in nats of all tokens but the first. A longer text is
        cut into windows. Each token is in one of them; the last one has all context that fits."""
        loss, size = 0.0, self.limit
        for first in range(1, len(ids), size):
            end = min(first + size, len(ids))
            begin = max(0, end - 1 - size)
            loss -= float(self.logps(ids[begin:end], first - begin)[0].double().sum())
        return loss

    def replies(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the number of a prompt and the likeliest tokens after it, without end tokens."""
        model, stop = self.texts.model, self.texts.stop
        longest = min(self.limit, max(map(len, prompts)) + max_tokens)
        decoder = self.decoder(_SLOTS, longest)
        if decoder is None:
            for number, ids in enumerate(prompts):
                found = continue_tokens(model, ids, max_tokens, temperature=0, stop=stop)
                yield number, [token for token in found if token not in stop]
            return
        how = Sampling(max_tokens, temperature=0, stop=tuple(sorted(stop)))
        requests = (
            CompletionRequest(CompletionKey(0, 0, number, 0), tuple(ids), how)
            for number, ids in enumerate(prompts)
        )
        for done in decoder.generate(requests, 0):
            yield done.key.prompt, [token for token in done.tokens if token not in stop]

    def decoder(self, slots: int, max_length: int) -> PolicyDecoder | None:
        """Return what generates several texts at a time; None for a model of transformers."""
        model, device = self.texts.model, torch.device("cpu")
        if not isinstance(model, Decoder):
            return None
        decoder = PolicyDecoder(model.config, device, slots=slots, max_length=max_length)
        decoder.load(dict(model.named_parameters()))
        return decoder

    def text_of(self, ids: Sequence[int]) -> str:
        return str(self.texts.tokenizer.decode(list(ids), skip_special_tokens=False))


def open_model(
    path: Path, step: int | None, base: Path | None, say: Callable[[str], None]
) -> EvaluatedModel:
    """Open the folder of a model, or a checkpoint of a run; the newest intact one if `step` is
    None. Raises UserError."""
    if is_model_folder(path):
        return EvaluatedModel(open_folder(path), f"weights of {path}")
    return open_checkpoint_of(with_base(open_run(path), base), step, say)


def open_checkpoint_of(run: Run, step: int | None, say: Callable[[str], None]) -> EvaluatedModel:
    """Open a checkpoint of a run. Raises UserError."""
    checkpoint, texts = with_checkpoint(run, step, lambda chosen: open_checkpoint(run, chosen), say)
    return EvaluatedModel(texts, f"checkpoint of step {checkpoint.step}", run, checkpoint)
