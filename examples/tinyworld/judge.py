"""Greedy answers to held-out questions, judged by exact match per skill.

python examples/tinyworld/judge.py MODEL_FOLDER held_out.jsonl
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from holdfast.config.sections.data import DataConfig, TokenizerConfig
from holdfast.config.sections.rewards import PromptsConfig, RewardConfig
from holdfast.data.read.vocabulary import load_tokenizer, stop_tokens, tokenizer_file
from holdfast.model.huggingface import import_folder
from holdfast.rollout.decode.policy import PolicyDecoder
from holdfast.rollout.messages import CompletionKey, CompletionRequest, Sampling
from holdfast.rollout.prompts import Prompt, read_prompts
from holdfast.rollout.rewards.rewards import Rewards

MAX_TOKENS = 40
SLOTS = 32


@dataclass(frozen=True)
class Score:
    """Held-out questions of one skill."""

    skill: str
    right: int
    asked: int
    shown: tuple[str, str, str]  # question, answer and reply of the first one that is wrong

    @property
    def share(self) -> float:
        return self.right / self.asked


def judge(folder: Path, questions: Path) -> list[Score]:
    """Return the score of each skill of a model in Hugging Face form."""
    config, tensors = import_folder(folder)
    path = tokenizer_file(folder)
    tokenizer: Tokenizer = load_tokenizer(path)
    stop = tuple(stop_tokens(tokenizer, path).values())
    prompts = read_prompts(
        [PromptsConfig(path=str(questions))],
        DataConfig(tokenizer=TokenizerConfig(path=str(folder))),
    )
    longest = min(config.max_position, prompts.max_tokens + MAX_TOKENS)
    decoder = PolicyDecoder(config, torch.device("cpu"), slots=SLOTS, max_length=longest)
    decoder.load({name: value.float() for name, value in tensors.items()})
    how = Sampling(MAX_TOKENS, temperature=0, stop=stop)
    requests = (CompletionRequest(CompletionKey(0, 0, p.number, 0), p.ids, how) for p in prompts)
    right: dict[str, list[bool]] = {}
    shown: dict[str, tuple[str, str, str]] = {}
    with Rewards([RewardConfig(kind="exact_match")]) as rewards:
        for done in decoder.generate(requests, 0):
            prompt = prompts[done.key.prompt]
            ids = [token for token in done.tokens if token not in stop]
            text, skill = tokenizer.decode(ids), str(prompt.columns["skill"])
            is_right = rewards.rate(prompt, text, ids) == (1.0,)
            right.setdefault(skill, []).append(is_right)
            if not is_right and skill not in shown:
                shown[skill] = (_question(prompt), str(prompt.answer), text)
    return [
        Score(skill, sum(found), len(found), shown.get(skill, ("", "", "")))
        for skill, found in sorted(right.items())
    ]


def _question(prompt: Prompt) -> str:
    return prompt.said if isinstance(prompt.said, str) else str(prompt.said[-1]["content"])


def main() -> None:
    torch.set_num_threads(1)
    scores = judge(Path(sys.argv[1]), Path(sys.argv[2]))
    for score in scores:
        question, answer, reply = score.shown
        mistake = f"  {question} -> {reply!r}, not {answer!r}" if question else ""
        print(f"{score.skill:8} {score.right:3} of {score.asked}{mistake}")
    right, asked = sum(s.right for s in scores), sum(s.asked for s in scores)
    print(f"{'all':8} {right:3} of {asked} ({right / asked:.1%})")


if __name__ == "__main__":
    main()
