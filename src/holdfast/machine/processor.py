"""What of a processor, and of the variables around it, decides the bits of a result. Imports no
torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

PRESETS = (
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
)
"""Variables that choose how torch computes."""
_VECTOR_UNIT = re.compile(r"(sse4_2|avx\w*|fma|f16c|amx_\w+|asimd\w*|sve\w*|i8mm|bf16)\Z")
_VENDOR = re.compile(r"(?:vendor_id|CPU implementer)\s*:\s*(\S+)", re.MULTILINE)


def processor_identity(
    environment: Mapping[str, str], cpuinfo: Path = Path("/proc/cpuinfo")
) -> dict[str, str]:
    """Return the vector units of the processor, its vendor, by which MKL chooses kernels, and the
    variables that choose among them."""
    try:
        text = cpuinfo.read_text("utf-8", "replace")
    except OSError:
        text = ""
    line = next((w for w in text.splitlines() if re.match(r"(flags|Features)\s*:", w)), "")
    units = [word for word in line.partition(":")[2].split() if _VECTOR_UNIT.match(word)]
    vendor = _VENDOR.search(text)
    found = {"vendor": vendor[1]} if vendor else {}
    presets = {name: environment[name] for name in PRESETS if environment.get(name)}
    return {"vector units": " ".join(sorted(units)) or "unknown", **found, **presets}
