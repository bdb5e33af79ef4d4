"""The releases of Megatron-Bridge that write or compute one model otherwise than each other.

Facts: METADATA of 0.3.1 (`megatron-core<0.17.0`), and of 0.4.0 to 0.6.2, which name no megatron-core.
"""

from __future__ import annotations

from formats.megatron.args.versions import FIRST, is_between

FIRST_RELEASE, LATER, LAST = "release 0.3.1", "releases from 0.4.0 on", "releases from 0.6.0 on"
NEWEST = "0.6.2"
"""The newest release that is known here."""
CORE_OF_FIRST = "0.16"
"""The newest megatron-core with which 0.3.1 runs."""


def is_first(version: str | None) -> bool:
    """Whether a release that runs with a megatron-core is 0.3.1; None is that of the newest release."""
    return version is not None and is_between(version, FIRST, CORE_OF_FIRST)
