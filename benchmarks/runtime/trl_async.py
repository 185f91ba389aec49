"""How often TRL's asynchronous GRPO uses each (prompt, sample) if its parts are killed.

    python -m benchmarks.runtime.trl_async [--prompts 60] [--kills none,trainer,worker,server]

One pass over the prompts, with TRL's own trainer, rollout worker and checkpoints, on a CPU. Needs
trl 1.16, requests and aiohttp; vLLM is not needed. A small server answers vLLM's protocol with
random tokens. The transfer of weights is left out: TRL lets a caller replace it. In TRL its check
for vLLM is replaced, of which the worker imports nothing. So are its question for a GPU's speed and
the kernel of FlashAttention 3. None of this decides which sample is used.

TRL drops samples that are older than max_staleness steps. So without kills, too, it uses some of
them never; --staleness 1000 turns that off. A trainer that exits starts again from its newest
checkpoint. One that hangs is killed first: a killed worker may hold a lock that the trainer waits
for. A lost server starts again. What counts is the lineage of the final weights: of each step the
last time that it was done. A pass uses each of the samples of a prompt once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SAMPLES, SAVE_STEPS, LENGTH = 4, 2, 256
STALE_S = 10.0
"""Seconds without a sign of life after which TRL's trainer gives its worker up."""
HANG_S = 100.0
"""Seconds without a step after which the trainer counts as hung, and is killed."""
DEADLINE_S = 1800.0


# --- a server of vLLM's protocol ------------------------------------------------------------------
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "policy", "max_model_len": LENGTH}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        draw = random.Random(asked["seed"])
        time.sleep(draw.uniform(0.02, 0.2))  # completions end in another order than they began
        tokens = [draw.randrange(10, 40) for _ in range(draw.randrange(1, asked["max_tokens"]))]
        logprobs = {"token_logprobs": [-3.4] * len(tokens)}
        self._answer({"choices": [{"token_ids": tokens, "logprobs": logprobs}]})

    def _answer(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)


# --- TRL's trainer ----------------------------------------------------------------------------
class NoTransfer:
    """Weights stay where they are: the server's tokens follow from the seed."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Any) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


def reward(completions: Sequence[Any], **_: Any) -> list[float]:
    return [float(len(str(each)) % 7) for each in completions]


class PlainAttention:
    """FlashAttention's function for texts of several lengths, in plain PyTorch."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, *_: Any, **named: Any
    ) -> Any:
        """q: [T, H, h], k, v: [S, K, h] -> [T, H, h]; the last query sees the last key."""
        import torch

        found = []
        groups = q.shape[1] // k.shape[1]
        for at in range(len(starts_q) - 1):
            mine = q[starts_q[at] : starts_q[at + 1]].transpose(0, 1)
            keys, values = (
                x[starts_k[at] : starts_k[at + 1]].transpose(0, 1).repeat_interleave(groups, 0)
                for x in (k, v)
            )
            scores = mine @ keys.transpose(1, 2) * named["softmax_scale"]
            ones = torch.ones(scores.shape[1:], dtype=torch.bool)
            hidden = ones.triu(scores.shape[2] - scores.shape[1] + 1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            found.append((weights @ values).transpose(0, 1))
        return torch.cat(found)


def write_model(folder: Path) -> None:
    """A tiny model, and a tokenizer with a template that TRL knows."""
    import transformers
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    names = {token: number for number, token in enumerate([*special, *sorted(letters)])}
    made = Tokenizer(models.BPE(vocab=names, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers.decoders import ByteLevel

    made.decoder = ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text()
    tokenizer.save_pretrained(folder)
    shape = transformers.Qwen3Config(
        vocab_size=len(names),
        hidden_size=32,
        intermediate_size=48,
        head_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformers.Qwen3ForCausalLM(shape).save_pretrained(folder)


def train(folder: Path, prompts: int, url: str, staleness: int) -> None:
    """Run TRL's trainer from its newest checkpoint. It writes which prompts each step used."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from transformers.trainer_utils import get_last_checkpoint
    from trl.experimental.async_grpo import (
        AsyncGRPOConfig,
        AsyncGRPOTrainer,
        async_grpo_trainer,
        async_rollout_worker,
        packing,
    )

    async_rollout_worker.is_vllm_available = lambda *_, **__: True
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1.0  # it asks for a GPU
    packing._flash_attn = PlainAttention
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    collated: list[list[int]] = []
    collate = async_grpo_trainer.DataCollatorForRollout.torch_call

    def note(self: Any, examples: list[Any]) -> Any:
        samples = [sample for row in examples[0] for sample in row.samples]
        texts = [tokenizer.decode(sample["input_ids"]) for sample in samples]
        collated.append([int(re.findall(r"question (\d+)\.", text)[0]) for text in texts])
        return collate(self, examples)

    class Noted(AsyncGRPOTrainer):  # type: ignore[misc]
        def training_step(self, *given: Any, **named: Any) -> Any:
            loss = super().training_step(*given, **named)
            line = {"step": self.state.global_step + 1, "prompts": collated.pop(0)}
            with (folder / "used.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            return loss

    async_grpo_trainer.DataCollatorForRollout.torch_call = note
    output = folder / "trl"
    config = AsyncGRPOConfig(
        str(output),
        num_train_epochs=1,
        per_device_train_batch_size=2 * SAMPLES,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES,
        token_budget=-1,
        max_completion_length=16,
        vllm_server_base_url=url,
        save_steps=SAVE_STEPS,
        max_staleness=staleness,
        max_inflight_tasks=4 * SAMPLES,
        heartbeat_stale_after_s=STALE_S,
        use_cpu=True,
        bf16=False,
        report_to=[],
        dtype="float32",
        logging_steps=1000,
        gradient_checkpointing=False,
    )
    asked = [[{"role": "user", "content": f"question {n}."}] for n in range(prompts)]
    trainer = Noted(
        str(folder / "model"),
        reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": asked}),
        processing_class=tokenizer,
        weight_transfer=NoTransfer(),
    )
    last = get_last_checkpoint(str(output)) if output.exists() else None
    trainer.train(resume_from_checkpoint=last)
    (folder / "done").touch()


# --- kills and counts ---------------------------------------------------------------------------
class Parts:
    """The server and the trainer, each started again when it has exited."""

    def __init__(self, folder: Path, prompts: int, port: int, staleness: int) -> None:
        self._folder, self._prompts, self._port = folder, prompts, port
        self._staleness = staleness
        self.trainer, self.server = self._start("train"), self._start("serve")
        self.starts, self.hangs, self._done, self._moved_at = 1, 0, 0, time.monotonic()

    def _start(self, what: str) -> subprocess.Popen[bytes]:
        said = (self._folder / f"{what}.log").open("ab")
        command = [sys.executable, "-m", "benchmarks.runtime.trl_async", "--as", what]
        command += ["--folder", str(self._folder), "--prompts", str(self._prompts)]
        command += ["--port", str(self._port), "--staleness", str(self._staleness)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(
            command, stdout=said, stderr=said, start_new_session=True, env=environment
        )

    def keep_running(self) -> None:
        if (done := len(used(self._folder))) != self._done:
            self._done, self._moved_at = done, time.monotonic()
        if time.monotonic() - self._moved_at > HANG_S:
            self._end(self.trainer)
            self.hangs, self._moved_at = self.hangs + 1, time.monotonic()
        if self.server.poll() is not None:
            self.server = self._start("serve")
        if self.trainer.poll() is not None and not (self._folder / "done").exists():
            self._end(self.trainer)
            self.trainer, self.starts = self._start("train"), self.starts + 1

    def kill(self, what: str) -> bool:
        """Send SIGKILL to a part; return False if it does not run yet."""
        import psutil

        if what == "server":
            self.server.kill()
            self.server.wait()
            return True
        if what == "trainer":
            self._end(self.trainer)
            return True
        with suppress(psutil.Error):
            for child in psutil.Process(self.trainer.pid).children(recursive=True):
                if "spawn_main" in " ".join(child.cmdline()):
                    child.kill()
                    return True
        return False

    def close(self) -> None:
        self._end(self.trainer)
        self._end(self.server)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def used(folder: Path) -> dict[int, list[int]]:
    """The prompts of the samples of each step, as the step was done last."""
    found: dict[int, list[int]] = {}
    with suppress(FileNotFoundError):
        for line in (folder / "used.jsonl").read_text().splitlines():
            row = json.loads(line)
            found[row["step"]] = row["prompts"]
    return found


def count(steps: dict[int, list[int]], prompts: int) -> str:
    """Say how many of the samples of a pass were used how often."""
    uses = Counter(number for step in steps.values() for number in step)
    wanted = [uses[number] for number in range(prompts)]
    once = sum(min(n, SAMPLES) for n in wanted)
    more = sum(max(0, n - SAMPLES) for n in wanted)
    return f"once {once}, again {more}, never {prompts * SAMPLES - once} of {prompts * SAMPLES}"


def measure(prompts: int, kills: Sequence[str], chooser: random.Random, staleness: int) -> str:
    """Run a pass, and kill these parts after steps drawn at random."""
    folder = Path(tempfile.mkdtemp(prefix="trl-"))
    write_model(folder / "model")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as free:
        port = free.server_port
    steps = prompts // 2
    at = sorted(chooser.sample(range(2, steps - 2), len(kills)))
    parts, left = Parts(folder, prompts, port, staleness), list(zip(at, kills, strict=True))
    until = time.monotonic() + DEADLINE_S
    try:
        while not (folder / "done").exists():
            if time.monotonic() > until or parts.starts > len(kills) + 3:
                return f"gave up: {(folder / 'train.log').read_text()[-1500:]}"
            if left and max(used(folder), default=0) >= left[0][0] and parts.kill(left[0][1]):
                left.pop(0)
            parts.keep_running()
            time.sleep(0.05)
        return f"{count(used(folder), prompts)}; {parts.starts} starts, {parts.hangs} hangs"
    finally:
        parts.close()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--kills", default="none,trainer,worker,server")
    parser.add_argument("--each", type=int, default=2, help="kills of a part in one run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--staleness", type=int, default=4, help="TRL's max_staleness")
    parser.add_argument("--as", dest="part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    roles: dict[str, Callable[[], None]] = {
        "serve": lambda: ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever(),
        "train": lambda: train(
            given.folder, given.prompts, f"http://127.0.0.1:{given.port}", given.staleness
        ),
    }
    if given.part:
        roles[given.part]()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # end all parts
    print(
        f"one pass of {given.prompts} prompts, {SAMPLES} samples each; a checkpoint every "
        f"{SAVE_STEPS} steps"
    )
    for part in given.kills.split(","):
        killed = [] if part == "none" else [part] * given.each
        found = measure(given.prompts, killed, random.Random(given.seed), given.staleness)
        print(f"{len(killed)} kills of {part}: {found}", flush=True)


if __name__ == "__main__":
    main()
