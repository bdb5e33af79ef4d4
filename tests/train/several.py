"""Trainings behind each other, in the same ranks: `several.py CONFIG.yml LIST`, a JSON list of lists of words.

DeepSpeed is imported once for all of them. Logits are computed in small chunks, of which the ranks have
different numbers.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from formats.errors import Interrupted
from train.distributed import world
from train.model import trainee
from train.run.loop import train
from train.settings.config_file import load_config

if __name__ == "__main__":
    trainee.CHUNK = 48
    with world(1, 2) as ranks:
        for options in json.loads(sys.argv[2]):
            with contextlib.suppress(Interrupted):
                train(load_config(Path(sys.argv[1]), options)[0], ranks, print)
