"""Prefixes that wrappers of torch put before a parameter's name."""

from __future__ import annotations

import re
from collections.abc import Collection

WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_fpw_module|_checkpoint_wrapped_module)\.")
"""Matches the parts that torch.compile, FSDP1 and activation checkpointing add to keys."""
DATA_PARALLEL = "module."


def unwrapped(key: str) -> str:
    """The key of a tensor in the model itself, without the parts that wrappers of modules add."""
    return re.sub(r"^(?:module\.)+", "", WRAPPERS.sub("", key))


def unwrapped_keys(names: Collection[str]) -> dict[str, str]:
    """The key in the model itself of each tensor of a model, by its name.

    DistributedDataParallel, which has a whole model, adds `module.` to all names; where only some begin with it, it is
    a part of the model itself, unless the rest is the name of another: then the two have one key.
    """
    keys = {name: WRAPPERS.sub("", name) for name in names}
    while keys and all(key.startswith(DATA_PARALLEL) for key in keys.values()):
        keys = {name: key.removeprefix(DATA_PARALLEL) for name, key in keys.items()}
    own = {*keys.values()}
    return {name: bare if (bare := unwrapped(key)) in own else key for name, key in keys.items()}
