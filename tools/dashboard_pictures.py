"""Take the pictures of the live page in a headless Chromium.

python tools/dashboard_pictures.py RUN [FOLDER_OF_RUNS]

The tool serves the run with `holdfast dashboard`, at 400 and 1280 CSS pixels, light and dark, and
writes docs/pictures/dashboard-WIDTH-SCHEME.png. With a folder of runs it also writes
docs/pictures/dashboard-runs.png. It needs chromium and Pillow.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # tests.support

from tests.support.browser import Browser, browser  # noqa: E402
from tests.support.dashboards import dashboard_of  # noqa: E402
from tests.support.ranks import wait_until  # noqa: E402

OUT = ROOT / "docs/pictures"
COLOURS = 200  # of a picture: a third of the bytes, and no difference to the eye
IS_READ = "!['loading', 'reading'].includes(document.getElementById('state').textContent)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("runs", type=Path, nargs="?")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as tab:
        with dashboard_of(arguments.run) as served:
            for width in (400, 1280):
                for scheme in ("light", "dark"):
                    take(tab, served.address, width, scheme, f"dashboard-{width}-{scheme}.png")
        if arguments.runs is not None:
            with dashboard_of(arguments.runs) as served:
                take(tab, served.address, 1280, "light", "dashboard-runs.png")


def take(tab: Browser, address: str, width: int, scheme: str, name: str) -> None:
    """Open the page, wait until it shows the journal, and store a picture of all of it."""
    tab.paint(scheme)
    tab.open(address, width, height=400)
    wait_until(lambda: bool(tab.value(IS_READ)))
    path = OUT / name
    tab.photograph(path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLOURS).save(path, optimize=True)
    print(f"wrote {path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
