"""Prefixes that wrappers of torch put before a parameter's name."""

from __future__ import annotations

import re

WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_fpw_module|_checkpoint_wrapped_module)\.")
"""What torch.compile, FSDP1 and activation checkpointing put into keys."""


def unwrapped(key: str) -> str:
    """A key of the model itself, whatever the training wrapped its modules in."""
    return re.sub(r"^(?:module\.)+", "", WRAPPERS.sub("", key))
