"""Trainings behind each other, in the same ranks: `several.py CONFIG.yml`, with a JSON list of lists of words on stdin.

Torch and transformers are imported once for all of them. Logits are computed in small chunks, of which the ranks have
different numbers.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from formats.errors import Interrupted
from train import model
from train.config import load_config
from train.distributed import world
from train.loop import train

if __name__ == "__main__":
    model.CHUNK = 48
    with world(1, 2) as ranks:
        for words in ranks.told(lambda: json.load(sys.stdin)):
            with contextlib.suppress(Interrupted):
                train(load_config(Path(sys.argv[1]), words)[0], ranks, print)
