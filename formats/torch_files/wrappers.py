"""Prefixes that wrappers of torch put before a parameter's name."""

from __future__ import annotations

import re

WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_fpw_module|_checkpoint_wrapped_module)\.")
"""Matches the parts that torch.compile, FSDP1 and activation checkpointing add to keys."""


def unwrapped(key: str) -> str:
    """The key of a tensor in the model itself, without the parts that wrappers of modules add."""
    return re.sub(r"^(?:module\.)+", "", WRAPPERS.sub("", key))
