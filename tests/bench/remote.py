"""From a Hub on loopback to Megatron, beside `hf download` and a conversion: python -m tests.bench.remote [--rounds N].

Each round runs both ways once, one after the other, in processes of their own that find nothing in a cache; a way's
figure is the median of its rounds. The Hub is one process of Python, the same for both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.bench.library import made
from tests.hub.server import TOKEN, Hub
from tests.remote.test_reading import publish

CONVERT = "import sys; from converters.cli import main; main()"
DOWNLOAD = (
    "import sys; from huggingface_hub import snapshot_download; snapshot_download('acme/tiny', local_dir='local')"
)
WAYS = {
    "hf download, then convert": ((DOWNLOAD,), (CONVERT, "hf2megatron", "local", "run", "--tp", "4", "--quiet")),
    "convert from hf://": ((CONVERT, "hf2megatron", "hf://acme/tiny", "run", "--tp", "4", "--quiet"),),
}
"""Way: its processes, one after the other."""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    disk: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name, Hub(Path(name) / "hub") as hub:
        place = Path(name)
        model, run = made(place, options.layers)
        nbytes = sum(path.stat().st_size for path in model.iterdir())
        publish(hub, model)
        hub.storage = 1
        shutil.rmtree(run)
        env = os.environ | {
            "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(place / "home"), "NO_PROXY": "127.0.0.1,localhost",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }  # fmt: skip
        for number in range(options.rounds + 1):
            for way, programs in WAYS.items():
                here = place / "here"
                here.mkdir()
                began = time.monotonic()
                for code, *argv in programs:
                    subprocess.run([sys.executable, "-c", code, *argv], cwd=here, env=env, check=True, timeout=900,
                                   capture_output=True)  # fmt: skip
                seconds[way] += [time.monotonic() - began] if number else []
                disk[way] = sum(path.stat().st_size for path in here.rglob("*") if path.is_file())
                shutil.rmtree(here)
                shutil.rmtree(place / "home", ignore_errors=True)
    for way, samples in seconds.items():
        spread = f"({min(samples):.1f} to {max(samples):.1f})"
        print(f"{way:28} {median(samples):6.1f} s {spread}  {nbytes / median(samples) / 1e6:5.0f} MB/s")
        print(f"{'':28} {disk[way] / nbytes:.1f} times the model is on the disk at the end")


if __name__ == "__main__":
    main()
