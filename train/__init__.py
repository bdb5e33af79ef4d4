"""Sharded fine-tuning and its data."""

import time

BEGAN = time.monotonic()
"""When this process began to load; time limits count from here."""
