"""Open a timeline in speedscope, in a headless Chromium, and take its picture.

python tools/timeline_picture.py TIMELINE SPEEDSCOPE [--to docs/pictures/timeline.png]

TIMELINE is what `holdfast trace timeline RUN --to TIMELINE` wrote. SPEEDSCOPE is the folder
package/dist/release of `npm pack speedscope`. The tool needs chromium and Pillow, and no network.
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # tests.support

from tests.support.browser import browser  # noqa: E402
from tests.support.ranks import wait_until  # noqa: E402

COLOURS = 128
TITLE = "document.title"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("timeline", type=Path)
    parser.add_argument("speedscope", type=Path)
    parser.add_argument("--to", type=Path, default=ROOT / "docs/pictures/timeline.png")
    arguments = parser.parse_args()
    name = arguments.timeline.name
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder) / "profile") as tab:
        content = base64.b64encode(arguments.timeline.read_bytes()).decode()
        script = Path(folder) / "timeline.js"
        script.write_text(f"speedscope.loadFileFromBase64('{name}', '{content}')")
        page = (arguments.speedscope / "index.html").resolve().as_uri()
        tab.paint("light")
        tab.open(f"{page}#localProfilePath={script}", 1280, height=720)
        wait_until(lambda: name in str(tab.value(TITLE)))
        tab.photograph(arguments.to)
        print(f"speedscope says: {tab.value(TITLE)}")
    with Image.open(arguments.to) as picture:
        picture.convert("RGB").quantize(COLOURS).save(arguments.to, optimize=True)
    print(f"wrote {arguments.to}: {arguments.to.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
