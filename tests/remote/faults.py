"""`make faults`: conversions from and to S3 and the Hub on loopback while requests go wrong, processes are killed.

Each round converts from one store into another with faults at random: 429, 500, 503, lines that are cut before or in
the middle of an answer. Some rounds are killed at random moments and begun again. What arrives has the digest of the
source, and before the end no reader finds a model.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.hub.server import TOKEN, Hub
from tests.hub.server import Fault as HubFault
from tests.models import build
from tests.remote.bucket import Fault, Server
from tests.remote.test_reading import publish

CODE = """
import sys
from converters.remote import retries
retries.FIRST = 0.002
from converters.cli import main
main()
"""
CHANCE = 0.15
STATUSES = (429, 500, 503, 0, -1)
VISIBLE = ("config.json", "index.json", "vitruvian.json")


class Unlucky(Hub):
    """A Hub on which requests that read go wrong at random."""

    failed = 0

    def fault(self, line: str) -> HubFault | None:
        """The fault of a request."""
        reads = line.startswith(("GET /cdn", "GET /acme", "HEAD /acme", "GET /api/models"))
        if random.random() > (CHANCE if reads else CHANCE / 10):
            return None
        self.failed += 1
        cut = HubFault(".", half=True) if "/cdn" in line else HubFault(".", status=500)
        return random.choice([cut, HubFault(".", status=503), HubFault(".", status=429), HubFault(".", drop_after=0)])


def visible(server: Server, hub: Hub, out: str) -> list[str]:
    """What of an output a reader would begin with."""
    if out.startswith("s3://"):
        names = server.names("models", out.removeprefix("s3://models/"))
    else:
        names = [*hub.store.content(out.removeprefix("hf://"))] if out.removeprefix("hf://") in hub.store.repos else []
    return [name for name in names if name.endswith(VISIBLE)]


def main() -> None:
    """Rounds until so many faults have been injected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    with tempfile.TemporaryDirectory() as name, Server() as server, Unlucky(Path(name) / "hub") as hub:
        place = Path(name)
        server.reset("models")
        hub.storage = 1
        source = build(place / "source", "llama", "bfloat16", num_hidden_layers=4)
        server.put(source, "models/source")
        publish(hub, source, "acme/source")
        env = os.environ | {
            "AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1", "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(place / "home"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1,localhost",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }  # fmt: skip

        def begin(*argv: object) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", CODE, *map(str, argv)]
            return subprocess.Popen(command, cwd=place, env=env, text=True, stdout=subprocess.PIPE)

        ran = begin("digest", source)
        digest = ran.communicate(timeout=100)[0].split()[0]
        began, rounds, kills = time.monotonic(), 0, 0
        while server.failed + hub.failed < args.faults:
            server.faults = [Fault(".", status, 1 << 30, CHANCE / len(STATUSES)) for status in STATUSES]
            src = random.choice(["s3://models/source", "hf://acme/source"])
            out = random.choice(["s3://models/out", "hf://acme/out"]) + f"-{rounds}"
            conversion = ["to", "huggingface", src, out, "--shard-size", "60kB", "--quiet"]
            for _ in range(random.choice([0, 0, 1, 2])):
                process = begin(*conversion)
                try:
                    process.wait(random.uniform(1.0, 6.0))
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    kills += 1
                    names = visible(server, hub, out)
                    staged = [*place.glob("*.partial")]
                    complete = any(file.endswith("vitruvian.json") for file in names)  # killed after its end
                    assert not names or staged or complete, f"{out}: {names} is visible"
                    assert not any(file.endswith("vitruvian.json") for file in names[:-1])
                process.wait()
            if not visible(server, hub, out) or [*place.glob("*.partial")]:  # killed while it cleaned up, too
                finished = begin(*conversion)
                text = finished.communicate(timeout=900)[0]
                assert finished.returncode == 0, text
                assert digest in text, text
            server.faults = []
            finished = begin("digest", out)
            assert finished.communicate(timeout=900)[0].split()[0] == digest
            assert not [*place.glob("*.partial")]
            rounds += 1
        seconds = time.monotonic() - began
        print(f"{server.failed + hub.failed} faults ({hub.failed} of the Hub) and {kills} kills in {rounds} rounds, "
              f"{seconds:.0f} s: every output has the digest of its source")  # fmt: skip


if __name__ == "__main__":
    main()
