"""Numbers of a document that is an image or a recording. numpy only.

patches   uint8 [patches, 3 * side * side]: an image in RGB, resized and cut to a square, as a grid
          of squares, row by row. A patch has its red pixels first, then green and blue. So do
          `torch.nn.functional.unfold` and the weights of a Conv2d.
log_mel   float16 [frames, mels]: the mean of a recording's channels, filled with silence up to
          `seconds`. The formula is that of Whisper (Radford et al. 2022, arXiv 2212.04356).
          Windows are Hann's, of 25 ms every 10 ms, and bands are Slaney's. Logarithms lie at
          most 8 below the largest, and become (x + 4) / 4.

Log-mel is computed in float64 and rounded to float16, so it is the same on each processor.
"""

from __future__ import annotations

import io
import warnings
import wave
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from holdfast.config.sections.features import FRAMES_PER_SECOND, USED_KEYS, FeaturesConfig
from holdfast.core.json_parsing import JsonMessage
from holdfast.errors import DataError

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
SOUNDS = (".wav", ".flac", ".ogg", ".mp3")
MAX_PIXELS = 64 << 20  # of an image: 192 MiB once it is decoded
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
"""Modes of Pillow with 8 bits a channel. Other ones would lose most of their values."""
FULL_SCALE = {1: 128.0, 2: 32768.0, 3: 8388608.0, 4: 2147483648.0}
"""Values of a sample of so many bytes up to 1.0."""
MEND = "mend it, or leave bad rows out with bad_rows: skip"


@dataclass(frozen=True)
class FeatureFormat(JsonMessage):
    """As `FeaturesConfig`."""

    kind: str
    image_size: int
    patch_size: int
    fit: str
    sample_rate: int
    mels: int
    seconds: float

    @staticmethod
    def of(config: FeaturesConfig) -> FeatureFormat | None:
        """None if documents are texts."""
        return FeatureFormat(**config.model_dump()) if config.is_on else None

    @staticmethod
    def of_settings(settings: Mapping[str, Any]) -> FeatureFormat:
        """The one that `settings` describes."""
        keys = {key: settings[key] for key in ("kind", *USED_KEYS[settings["kind"]])}
        return FeatureFormat(**FeaturesConfig().model_dump() | keys)

    @property
    def endings(self) -> tuple[str, ...]:
        return IMAGES if self.kind == "patches" else SOUNDS

    @property
    def column(self) -> str:
        return "image" if self.kind == "patches" else "audio"

    @property
    def shape(self) -> tuple[int, int]:
        if self.kind == "patches":
            return (self.image_size // self.patch_size) ** 2, 3 * self.patch_size**2
        return round(self.seconds * FRAMES_PER_SECOND), self.mels

    @property
    def dtype(self) -> str:
        return "|u1" if self.kind == "patches" else "<f2"

    @property
    def document_bytes(self) -> int:
        """Of a document's numbers."""
        rows, values = self.shape
        return rows * values * np.dtype(self.dtype).itemsize

    def settings(self) -> dict[str, Any]:
        """What of it decides the content of a dataset, and the form of the numbers."""
        keys = {key: getattr(self, key) for key in ("kind", *USED_KEYS[self.kind])}
        return {**keys, "shape": list(self.shape), "dtype": self.dtype}

    def make(self, content: bytes, where: str) -> NDArray[Any]:
        """Return the numbers of an image or recording, [shape]. Raises DataError."""
        try:
            if self.kind == "patches":
                image = open_image(content)
                return _patches(_squared(image, self.image_size, self.fit), self.patch_size)
            return self._log_mel(*decode_sound(content))
        except ValueError as error:
            raise DataError(str(error), where=where, remedy=MEND) from None
        except ImportError as error:
            name, extra = ("pillow", "vision") if self.kind == "patches" else ("soundfile", "audio")
            raise DataError(
                f"this file needs the package {name} ({error})",
                where=where,
                remedy=f"pip install 'holdfast[{extra}]'",
            ) from None

    def _log_mel(self, sound: NDArray[np.float64], rate: int) -> NDArray[np.float16]:
        size = round(self.seconds * self.sample_rate)
        if rate != self.sample_rate:
            raise ValueError(
                f"it has {rate:,} samples a second, not data.features.sample_rate "
                f"{self.sample_rate:,}"
            )
        if len(sound) > size:
            raise ValueError(
                f"it has {len(sound) / rate:.2f} s, more than data.features.seconds "
                f"{self.seconds:g}"
            )
        return log_mel(np.pad(sound, (0, size - len(sound))), rate, self.mels)


class MediaText(str):
    """Text of a document that has an image or a recording."""

    content: bytes
    where: str
    form: FeatureFormat
    leave: Callable[[DataError], None]

    def __new__(
        cls,
        text: str,
        content: bytes,
        where: str,
        form: FeatureFormat,
        leave: Callable[[DataError], None],
    ) -> MediaText:
        """leave: gets the error of a document that cannot be decoded, or raises it."""
        made = super().__new__(cls, text)
        made.content, made.where, made.form, made.leave = content, where, form, leave
        return made

    def features(self) -> NDArray[Any]:
        """Decode the document: [shape]. Raises DataError."""
        return self.form.make(self.content, self.where)

    def hash(self) -> tuple[int, int, int]:
        """As `filters.plain.hash_document`, of the numbers and the text. All 0 for a document that
        cannot be decoded and is left out."""
        try:
            numbers = self.features()
        except DataError as error:
            self.leave(error)
            return 0, 0, 0
        return *hash_media(self, numbers), max(1, len(self.encode()))


def hash_media(text: str, numbers: NDArray[Any]) -> tuple[int, int]:
    """Two halves of the hash of a document with an image or a recording."""
    state = xxh3_128(text.encode())
    state.update(b"\0" + numbers.tobytes())
    digest = state.intdigest()
    return digest >> 64, digest & (2**64 - 1)


# --- images ---------------------------------------------------------------------------------
def open_image(content: bytes) -> Any:
    """Return a Pillow image in RGB, turned as its EXIF says. Raises ValueError for bytes that are
    no image, and ImportError without Pillow."""
    from PIL import Image, ImageOps

    if not content:
        raise ValueError("the image is empty: it has no bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what matters is refused below
            image = Image.open(io.BytesIO(content))
            width, height = image.size
            frames = getattr(image, "n_frames", 1)
    except Exception as error:  # what decoders raise for hostile bytes has no common class
        what = str(error) if "<_io.BytesIO" not in str(error) else "no known format"
        raise ValueError(f"this is no image that Pillow reads ({what[:200]})") from None
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"the image has {width:,} x {height:,} pixels, more than {MAX_PIXELS:,} together"
        )
    if frames > 1:
        raise ValueError(f"the image has {frames} frames, and one is needed")
    if image.mode not in MODES:
        raise ValueError(f"the image has pixels of the mode {image.mode}, not of 8 bits")
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # the same
        raise ValueError(f"the image is damaged or cut short ({str(error)[:200]})") from None


def _squared(image: Any, size: int, fit: str) -> NDArray[np.uint8]:
    """[size, size, 3]"""
    from PIL.Image import Resampling

    box = None
    if fit == "crop":
        side = min(image.size)
        left, top = ((length - side) // 2 for length in image.size)
        box = (left, top, left + side, top + side)
    if box != (0, 0, size, size) and (box is not None or image.size != (size, size)):
        image = image.resize((size, size), Resampling.BICUBIC, box)
    return np.asarray(image)


def _patches(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """[size, size, 3] -> [patches, 3 * side * side]"""
    count = len(pixels) // side
    grid = pixels.reshape(count, side, count, side, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(grid.reshape(count * count, 3 * side * side))


# --- recordings -----------------------------------------------------------------------------
def decode_sound(content: bytes) -> tuple[NDArray[np.float64], int]:
    """Return the mean of the channels, from -1 to 1, and the samples a second. PCM wav is read
    without a library. Raises ValueError for bytes that are no recording, and ImportError without
    soundfile."""
    if not content:
        raise ValueError("the recording is empty: it has no bytes")
    try:
        values, rate = decode_wav(content)
    except wave.Error:
        values, rate = _decode_with_library(content)
    if not len(values):
        raise ValueError("the recording is empty: it has no samples")
    if not np.isfinite(values).all():
        raise ValueError("the recording has samples that are no finite numbers")
    return values, rate


def decode_wav(content: bytes) -> tuple[NDArray[np.float64], int]:
    """As `decode_sound`, of PCM wav. Raises wave.Error for any other format."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            count = file.getnframes()
            frames = file.readframes(count)
    except (EOFError, RuntimeError):  # of wave, for lengths of blocks that do not fit
        raise ValueError("the recording is cut short: its header is not complete") from None
    if width not in FULL_SCALE:
        raise ValueError(f"the recording has {8 * width} bits a sample, not 8, 16, 24 or 32")
    if len(frames) != count * width * channels:
        has = len(frames) // (width * channels)
        raise ValueError(f"the recording is cut short: {has:,} of {count:,} samples are there")
    if width == 1:
        values = np.frombuffer(frames, np.uint8).astype(np.float64) - 128
    elif width == 3:
        padded = np.zeros((len(frames) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(frames, np.uint8).reshape(-1, 3)
        values = (padded.view("<i4")[:, 0] >> 8).astype(np.float64)
    else:
        values = np.frombuffer(frames, f"<i{width}").astype(np.float64)
    return (values / FULL_SCALE[width]).reshape(-1, channels).mean(1), rate


def _decode_with_library(content: bytes) -> tuple[NDArray[np.float64], int]:
    import soundfile

    try:
        values, rate = soundfile.read(io.BytesIO(content), dtype="float64", always_2d=True)
    except (RuntimeError, OSError, TypeError, ValueError) as error:
        what = str(error).rpartition(": ")[2].rstrip(".")[:200]
        raise ValueError(f"this is no recording that libsndfile reads ({what})") from None
    return values.mean(1), int(rate)


def log_mel(sound: NDArray[np.float64], rate: int, mels: int) -> NDArray[np.float16]:
    """[samples] -> [samples // hop, mels]"""
    size, hop = rate // 40, rate // FRAMES_PER_SECOND
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)
    padded = np.pad(sound, size // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop][: len(sound) // hop]
    bands = _mel_bands(rate, size, mels)
    out = np.empty((len(frames), mels))
    for at in range(0, len(frames), FRAMES_PER_SECOND):  # a second at a time, for memory
        part = slice(at, at + FRAMES_PER_SECOND)
        out[part] = (np.abs(np.fft.rfft(frames[part] * window)) ** 2) @ bands
    out = np.log10(np.maximum(out, 1e-10))
    out = np.maximum(out, out.max() - 8.0)
    found: NDArray[np.float16] = ((out + 4.0) / 4.0).astype(np.float16)
    return found


@lru_cache(maxsize=4)
def _mel_bands(rate: int, size: int, mels: int) -> NDArray[np.float64]:
    """Triangles of Slaney's scale, each of area 1: [size // 2 + 1, mels]. The scale is linear up to
    1,000 Hz, which is 15 mel, and logarithmic above."""
    step = np.log(6.4) / 27.0
    top = 15.0 + np.log(max(rate / 2, 1000.0) / 1000.0) / step
    if rate / 2 < 1000.0:
        top = 3.0 * rate / 2 / 200.0
    points = np.linspace(0.0, top, mels + 2)
    hertz = np.where(points < 15.0, 200.0 * points / 3.0, 1000.0 * np.exp(step * (points - 15.0)))
    bins = np.linspace(0.0, rate / 2, size // 2 + 1)[:, None]
    width = np.diff(hertz)
    rising = (bins - hertz[:-2]) / width[:-1]
    falling = (hertz[2:] - bins) / width[1:]
    found: NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return found * (2.0 / (hertz[2:] - hertz[:-2]))
