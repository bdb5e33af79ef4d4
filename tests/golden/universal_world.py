"""Run DeepSpeed's own ds_to_universal on a checkpoint.

    python universal_world.py --input_folder TAG --output_folder OUT [--inject_missing_state] ...

Its files are of the test's own, so that they may be unpickled. The arguments of BigScience's tree hold a member of an
enum of that tree, which `mds_world` defines.
"""

from __future__ import annotations

import os

import mds_world as _  # noqa: F401
from deepspeed.checkpoint import ds_to_universal

if __name__ == "__main__":
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    ds_to_universal.main(ds_to_universal.parse_arguments())
