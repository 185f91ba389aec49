"""What actors and scorers do, in a process of their own or in a trainer without any.

A turn reports what is done, takes leases, and works for a while. A thread sends signs of life while
a turn works. Results stay here until the step that needs them is trained. If the queue is lost,
they are handed in again.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.adapters import lora_parameters
from holdfast.core.sharding.boxes import whole_box
from holdfast.core.sharding.parameters import SCORE, decoder_parameters
from holdfast.errors import HoldfastError, UserError
from holdfast.model.peft_folder import write_adapter
from holdfast.rollout.decode.policy import PolicyDecoder
from holdfast.rollout.decode.server import ServerDecoder
from holdfast.rollout.decode.server_link import ServerAddress, ServerUnavailableError
from holdfast.rollout.messages import Begun, Completion, CompletionKey
from holdfast.rollout.roles.client import NoQueueError, QueueClient, pause
from holdfast.rollout.roles.messages import (
    BEAT_S,
    Made,
    Part,
    PolicyPart,
    Role,
    RoleOrders,
    RoleReport,
    Scored,
    Wanted,
)
from holdfast.rollout.roles.policies import fetch_policy, has_policy, read_policy
from holdfast.rollout.roles.texts import Texts, open_rewards
from holdfast.rollout.roles.weight_files import own_folder
from holdfast.training.engine.precision import Precision
from holdfast.training.engine.task import DecoderTask, open_weights

logger = logging.getLogger(__name__)

Result = TypeVar("Result", Made, Scored)


class RoleWork(ABC, Generic[Result]):
    """The part that actors and scorers have in common."""

    role: Role

    def __init__(
        self, config: RunConfig, client: QueueClient, name: str, node: str, stands_in: bool = False
    ) -> None:
        self._config, self._client, self._name, self._node = config, client, name, node
        self._stands_in = stands_in
        self._queue = ""
        self._busy: dict[Wanted, None] = {}
        self._kept: dict[Wanted, Result] = {}  # results that may have to be handed in again
        self._unsent: dict[Wanted, Result] = {}
        self._begun: tuple[Part, ...] = ()  # of leases, as the working thread has last written it
        self._handed_in: dict[Wanted, int] = {}  # tokens of leases that the queue has
        self._failure = ""
        self._lock = threading.Lock()  # one report at a time
        self._reported_at = 0.0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"{self.role} beat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send no more signs of life."""
        self._is_closed.set()
        self._client.interrupt()
        self._thread.join()

    def interrupt(self) -> None:
        """End what the turn of another thread waits for or computes."""
        self._client.interrupt()

    def turn(self, wait: float) -> None:
        """Report, take leases, and work. wait: seconds to wait for work. A queue that does not
        answer is asked again in the next turn."""
        try:
            # Results go in a report that is answered at once: then a kill loses none of them.
            is_idle = not self._busy and not self._unsent
            orders = self._report(self._free, wait if is_idle else 0.0)
        except NoQueueError:
            pause()
        else:
            self._take(orders)
        if self._busy:
            self._work()

    @property
    @abstractmethod
    def _free(self) -> int:
        """Leases that could be taken now."""

    @abstractmethod
    def _take(self, orders: RoleOrders) -> None:
        """Begin what was ordered."""

    @abstractmethod
    def _work(self) -> None:
        """Work on what was begun, until something is done or a moment has passed."""

    def _finish(self, wanted: Wanted, result: Result) -> None:
        del self._busy[wanted]
        self._kept[wanted] = self._unsent[wanted] = result

    def _report(self, free: int, wait: float) -> RoleOrders:
        with self._lock:
            sent, failure = dict(self._unsent), self._failure
            results = tuple(sent.values())
            report = RoleReport(
                self.role,
                self._name,
                self._queue,
                self._node,
                free,
                tuple(self._busy),
                tuple(each for each in results if isinstance(each, Made)),
                tuple(each for each in results if isinstance(each, Scored)),
                failure,
                wait,
                self._stands_in,
                begun := tuple(part for part in self._begun if self._is_news(part)),
            )
            orders = self._client.work(report)
            self._reported_at = time.monotonic()
            self._handed_in |= {part.wanted: len(part.tokens) for part in begun}
            for wanted in sent:
                self._unsent.pop(wanted, None)
            self._failure = "" if self._failure == failure else self._failure
            if orders.queue != self._queue:  # it has nothing of what another one was given
                self._queue = orders.queue
                self._handed_in = {}
                self._unsent |= {w: r for w, r in self._kept.copy().items() if w not in sent}
            # A copy: while the thread of `_beat` is here, the other one may finish a result.
            for wanted in [w for w in self._kept.copy() if w.step < orders.step]:
                del self._kept[wanted]
                self._unsent.pop(wanted, None)
            return orders

    def _is_news(self, part: Part) -> bool:
        """Return True for a beginning of a lease that the queue does not have."""
        return part.wanted in self._busy and self._handed_in.get(part.wanted, 0) < len(part.tokens)

    def _beat(self) -> None:
        """Send signs of life while the other thread works."""
        while not self._is_closed.wait(BEAT_S / 4):
            if self._busy and time.monotonic() - self._reported_at > BEAT_S:
                try:
                    self._report(0, 0.0)
                except HoldfastError:
                    logger.debug(
                        "no sign of life was taken", exc_info=True
                    )  # the next turn says so


class Actor(RoleWork[Made]):
    """Generates completions."""

    role: Role = "actor"

    def __init__(
        self,
        config: RunConfig,
        client: QueueClient,
        name: str,
        node: str,
        *,
        texts: Texts,
        device: torch.device,
        folder: Path | None,
        slots: int,
        stands_in: bool = False,
        count_loss: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """Make an actor without a decoder.

        Args:
            folder: where the trainers of this node publish; None: there are none.
            count_loss: called with the tokens that would be lost if this process died now.
        """
        self._count_loss = count_loss
        self._given: dict[Wanted, Part] = {}  # what lost actors had of leases
        self._texts, self._device, self._slots = texts, device, slots
        self._shared = folder
        self._decoder: PolicyDecoder | ServerDecoder | None = None
        self._reference: PolicyDecoder | None = None  # once a completion was read with it
        self._written_at = 0.0  # when `_begun` was written, by the clock of `time.monotonic`
        self._score: Tensor | None = None  # the policy's head of values, if rows need old ones
        self._tag = ""  # of the policy that the decoder has
        self._places: dict[str, list[PolicyPart]] = {}
        self._waiting: deque[Wanted] = deque()
        self._running: dict[CompletionKey, Wanted] = {}
        super().__init__(config, client, name, node, stands_in)

    @property
    def _free(self) -> int:
        return self._slots - len(self._busy)

    def _take(self, orders: RoleOrders) -> None:
        if isinstance(self._decoder, PolicyDecoder):
            self._count(self._decoder)
        self._handed_in = {w: n for w, n in self._handed_in.copy().items() if w in self._busy}
        for part in orders.policies:
            places = self._places.setdefault(part.tag, [])
            if part not in places:
                places.append(part)
        self._given |= {part.wanted: part for part in orders.begun}
        self._handed_in |= {part.wanted: len(part.tokens) for part in orders.begun}
        for wanted in orders.wanted:
            if wanted not in self._busy:
                self._busy[wanted] = None
                self._waiting.append(wanted)

    def _work(self) -> None:
        try:
            self._start_waiting()
        except (NoQueueError, OSError):  # no weights: the policy is not needed any more
            self._drop_waiting()
            pause()
            return
        decoder = self._decoder
        if decoder is None or not self._running:
            return
        until = time.monotonic() + BEAT_S
        while self._running and time.monotonic() < until and not self._client.is_interrupted:
            ended = decoder.step()
            self._protect(decoder)
            for completion in ended:
                wanted = self._running.pop(completion.key)
                self._finish(wanted, self._made(wanted, completion))
            if ended:
                return

    def _start_waiting(self) -> None:
        """Begin the leases of the decoder's policy; load the next policy once none is running."""
        while self._waiting:
            wanted = self._waiting[0]
            if wanted.tag != self._tag:
                if self._running:
                    return
                self._load(wanted)
            self._waiting.popleft()
            assert self._decoder is not None, "loaded above"
            self._running[wanted.key] = wanted
            request, given = self._texts.request(wanted), self._given.pop(wanted, None)
            if given is not None and isinstance(self._decoder, PolicyDecoder):
                begun = Begun(wanted.key, given.tokens, given.logps)
                ended = self._decoder.start(request, self._config.seed, begun)
            else:
                ended = self._decoder.start(request, self._config.seed)
            if ended is not None:
                del self._running[wanted.key]
                self._finish(wanted, self._made(wanted, ended))

    def _made(self, wanted: Wanted, completion: Completion) -> Made:
        """Return a result, with what the objective needs of it next to its tokens."""
        config, decoder, side = self._config, self._decoder, dict[str, tuple[float, ...]]()
        if not isinstance(decoder, PolicyDecoder):
            return Made.of(wanted, completion)
        request = self._texts.request(wanted)
        if self._score is not None:
            side["old_values"] = decoder.read(request, completion.tokens, score=self._score)
        if config.has_read_reference and config.lora.rank:
            side["reference"] = decoder.read(request, completion.tokens, of_base=True)
        elif config.has_read_reference:
            self._reference = self._reference or make_reference(config, self._device)
            side["reference"] = self._reference.read(request, completion.tokens)
        return Made.of(wanted, completion, side)

    def _protect(self, decoder: PolicyDecoder | ServerDecoder) -> None:
        """Hand in the tokens of completions under way before a kill would lose more than one
        completion of them, and now and then. A server has them where this process cannot see."""
        if not isinstance(decoder, PolicyDecoder):
            return
        lost = self._count(decoder)
        is_much = lost + decoder.slots > max(self._texts.sampling.max_tokens, 2 * decoder.slots)
        if is_much or time.monotonic() - self._written_at > BEAT_S:
            self._written_at = time.monotonic()
            self._begun = tuple(
                Part(self._running[one.key], one.tokens, one.logps) for one in decoder.begun()
            )
            if is_much and decoder.slots > 1:
                with suppress(NoQueueError):  # the next report has them
                    self._report(0, 0.0)
                self._count(decoder)

    def _count(self, decoder: PolicyDecoder) -> int:
        """Count the tokens that a kill would lose now."""
        unsent, handed_in = self._unsent.copy(), self._handed_in.copy()
        safe = sum(n for w, n in handed_in.items() if w in unsent or w in self._busy)
        lost = decoder.drawn + sum(len(made.tokens) for made in unsent.values()) - safe
        self._count_loss(max(0, lost))
        return lost

    def _drop_waiting(self) -> None:
        """Give leases back: the next report no longer names them."""
        while self._waiting:
            wanted = self._waiting.popleft()
            self._busy.pop(wanted, None)
            self._given.pop(wanted, None)

    def _own_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those that a decoder has: a head that gives values is not one of them."""
        model, lora = policy_model(self._config), self._config.lora
        rows = lora_parameters(model, lora) if lora.rank else decoder_parameters(model)
        return {row.name: weights[row.name] for row in rows}

    def _load(self, wanted: Wanted) -> None:
        """Load the policy of a lease. Raises OSError and NoQueueError if its files are missing."""
        parts = self._places.get(wanted.tag, [])
        if not parts:
            raise NoQueueError("the queue names no place of the policy")
        folder, fetched = self._shared, None
        try:
            if folder is None or not has_policy(folder, parts):
                folder = fetched = own_folder(os.getpid())
                fetch_policy(folder, parts, self._client.fetch)
            try:
                weights = read_policy(folder, parts[0])
            except Exception as error:  # the library raises its own kinds for a missing file
                raise OSError(str(error)) from error
            if self._decoder is None:
                self._decoder = self._make_decoder()
            if isinstance(self._decoder, PolicyDecoder):
                self._decoder.load(self._own_weights(weights))
                if self._config.objective.of_steps and SCORE in weights:
                    self._score = weights[SCORE].to(self._device)
            else:
                self._load_on_server(self._decoder, weights, wanted)
        finally:
            if fetched is not None:  # the decoder has a copy, and memory is short
                shutil.rmtree(fetched, ignore_errors=True)
        self._tag = wanted.tag
        self._places = {wanted.tag: parts}

    def _make_decoder(self) -> PolicyDecoder | ServerDecoder:
        server = self._config.rollout.server
        if not server.url:
            return make_decoder(self._config, self._device, self._slots)
        return ServerDecoder(
            ServerAddress(server.url, server.model, server.key_variable), self._slots
        )

    def _load_on_server(
        self, decoder: ServerDecoder, weights: Mapping[str, Tensor], wanted: Wanted
    ) -> None:
        """Write the policy's adapters, and have the server load them. Raises UserError if it
        refuses, NoQueueError if it does not answer."""
        config, name = self._config, f"{self._config.name}-{wanted.policy}-{wanted.tag}"
        place = config.rollout.server.folder
        with tempfile.TemporaryDirectory("-adapter", "holdfast-", place or None) as parent:
            os.chmod(parent, 0o755)  # the server may be another user's
            folder = Path(parent) / name
            write_adapter(folder, config.model, config.lora, weights, {"policy": wanted.policy})
            try:
                decoder.use_adapter(name, str(folder))
            except ServerUnavailableError as error:
                raise NoQueueError(str(error)) from error


def policy_model(config: RunConfig) -> ModelConfig:
    """Return the model that generates: without the head that gives values."""
    return config.model.model_copy(update={"score_head": "none"})


def make_decoder(config: RunConfig, device: torch.device, slots: int) -> PolicyDecoder:
    """Make a decoder for the run's policy, with the base of its adapters, and no weights else."""
    lora, model = config.lora, policy_model(config)
    decoder = PolicyDecoder(
        model,
        device,
        slots=slots,
        max_length=min(config.data.sequence_length + 1, config.model.max_position),
        dtype=Precision.of(config.train.precision).compute,
        lora=lora if lora.rank else None,
    )
    if lora.rank:
        base = open_weights(model, Path(lora.base), lora.base_checksum, "lora.base")
        decoder.load_base({p.name: base[p.name] for p in decoder_parameters(model)})
    return decoder


def make_reference(config: RunConfig, device: torch.device) -> PolicyDecoder:
    """Make a decoder of the frozen reference: that of objective.reference, or what the run began
    with."""
    model, named = policy_model(config), config.objective.reference
    if named.model:
        model_of = {"weights": named.model, "weights_checksum": named.checksum}
        model = model.model_copy(update=model_of)
    initial = DecoderTask(config.model_copy(update={"model": model})).initial_values(config.seed)
    decoder = PolicyDecoder(
        model,
        device,
        slots=1,
        max_length=min(config.data.sequence_length + 1, config.model.max_position),
        dtype=Precision.of(config.train.precision).compute,
    )
    rows = decoder_parameters(model)
    decoder.load({row.name: initial(row, whole_box(row.name, row.shape)) for row in rows})
    return decoder


class Scorer(RoleWork[Scored]):
    """Rates completions."""

    role: Role = "scorer"

    def __init__(
        self,
        config: RunConfig,
        client: QueueClient,
        name: str,
        node: str,
        *,
        texts: Texts,
        stands_in: bool = False,
    ) -> None:
        self._texts = texts
        self._rewards = open_rewards(config)
        self._waiting: deque[Made] = deque()
        super().__init__(config, client, name, node, stands_in)

    def close(self) -> None:
        super().close()
        self._rewards.close()

    @property
    def _free(self) -> int:
        return 0 if self._waiting else 1

    def _take(self, orders: RoleOrders) -> None:
        for made in orders.made:
            self._busy[made.wanted] = None
            self._waiting.append(made)

    def _work(self) -> None:
        if not self._waiting:
            return
        made = self._waiting.popleft()
        text = self._texts.text(made.tokens)
        try:
            rewards = self._rewards.rate(self._texts.prompts[made.wanted.prompt], text, made.tokens)
        except UserError as error:
            del self._busy[made.wanted]
            self._failure = str(error)
            return
        self._finish(made.wanted, Scored(made, text, rewards))
