"""Tiny models of sound and of images with random weights, and shards for them to learn from.

They stand in the place of a model that you would download and of your own recordings and images.
A recording is a row of tones, and its text names them. An image is a coloured square on a dark
ground, and its text names colour or size. Needs transformers; images need pillow, too.
"""

from __future__ import annotations

import io
import json
import tarfile
import wave
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

END, IMAGE = "<|end|>", "<image>"
RATE = 16_000  # samples a second
TONES = {"low": 300.0, "middle": 700.0, "high": 1600.0}  # Hz
COLOURS = {"red": (230, 40, 40), "green": (40, 220, 60), "blue": (50, 60, 240)}
SIZES = {"small": 8, "large": 20}  # pixels of a square, of 32
SHARDS = 4


def write_tokenizer(folder: Path, words: list[str]) -> PreTrainedTokenizerFast:
    """Write a tokenizer with one token a word."""
    vocabulary = {word: i for i, word in enumerate([END, IMAGE, *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([END, IMAGE])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_speech_model(folder: Path) -> None:
    """Write a model of the shape of Whisper, its feature extractor and its tokenizer."""
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=16,
        num_mel_bins=16,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=50,  # half the frames of a second
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(0)
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    write_tokenizer(folder, [*TONES])


def write_vision_model(folder: Path) -> None:
    """Write a model of the shape of LLaVA: CLIP's tower of images, and a Llama."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    words = ["which", "colour", "is", "it", "how", "big", *COLOURS, *SIZES]
    tokenizer = write_tokenizer(folder, words)
    size = {"hidden_size": 48, "intermediate_size": 96}
    depth = {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            **size, **depth, image_size=32, patch_size=8, projection_dim=48
        ),
        text_config=LlamaConfig(
            vocab_size=16,
            **size,
            **depth,
            num_key_value_heads=2,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
        ),
        image_token_index=1,
        image_seq_length=16,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    images = CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # the class token, which is left out
    ).save_pretrained(folder)


def recordings(copies: int, seed: int) -> Iterator[dict[str, bytes]]:
    """Yield rows of three tones, each with a noise of its own."""
    draw = np.random.default_rng(seed)
    seconds = np.arange(RATE // 4) / RATE
    for _, names in product(range(copies), product(TONES, repeat=3)):
        wave_of = np.concatenate([np.sin(2 * np.pi * TONES[name] * seconds) for name in names])
        heard = 0.4 * wave_of + 0.02 * draw.standard_normal(len(wave_of))
        file = io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(RATE)
            out.writeframes((heard * 32767).astype("<i2").tobytes())
        yield {".wav": file.getvalue(), ".txt": " ".join(names).encode()}


def pictures(copies: int, seed: int) -> Iterator[dict[str, bytes]]:
    """Yield squares of a colour and a size, each at a place of its own."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    for _, (colour, size), asks in product(range(copies), product(COLOURS, SIZES), (0, 1)):
        pixels = draw.integers(0, 40, (32, 32, 3), dtype=np.uint8)
        side = SIZES[size]
        top, left = (int(number) for number in draw.integers(0, 33 - side, 2))
        pixels[top : top + side, left : left + side] = COLOURS[colour]
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        prompt, answer = (("which colour is it", colour), ("how big is it", size))[asks]
        row = {"prompt": prompt, "completion": answer}
        yield {".png": file.getvalue(), ".json": json.dumps(row).encode()}


def write_shards(folder: Path, samples: Iterator[Mapping[str, bytes]]) -> None:
    """Write tar files in which the files of a sample have one name."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(samples)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as out:
            for number in range(shard, len(rows), SHARDS):
                for extension, content in rows[number].items():
                    info = tarfile.TarInfo(f"{number:06d}{extension}")
                    info.size = len(content)
                    out.addfile(info, io.BytesIO(content))


def write_all(kind: str, folder: Path) -> None:
    """Write model, shards and validation shards of a kind: speech or images."""
    disable_progress_bar()
    set_verbosity_error()
    if kind == "speech":
        write_speech_model(folder / "model")
        write_shards(folder / "train", recordings(12, seed=1))
        write_shards(folder / "validation", recordings(1, seed=2))
    else:
        write_vision_model(folder / "model")
        write_shards(folder / "train", pictures(40, seed=1))
        write_shards(folder / "validation", pictures(2, seed=2))
