"""Write what is in an image as a CycloneDX 1.6 document to stdout: `python sbom.py LOCK`.

It ends with an error if a package of the lock is missing or another version, or lacks something that it requires.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from shutil import which
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")
DPKG = ["dpkg-query", "--show", "--showformat", r"${Package}\t${Version}\t${Architecture}\n"]


def installed() -> dict[str, Distribution]:
    """Every distribution that is imported, by name: the first on the path."""
    found: dict[str, Distribution] = {}
    for one in distributions():
        found.setdefault(canonicalize_name(one.metadata["Name"]), one)
    return dict(sorted(found.items()))


def faults(lock: Path, found: dict[str, Distribution]) -> list[str]:
    """What of the lock is not there, and which requirements of it and of ours are not met."""
    pinned = dict(match.groups() for line in lock.read_text().splitlines() if (match := PINNED.match(line)))
    wrong = []
    for name, wanted in pinned.items():
        held = found.get(canonicalize_name(name))
        if held is None or held.version != wanted:
            wrong.append(f"{name} is {held.version if held else 'missing'}, the lock says {wanted}")
    for name, extra in (*((name, "") for name in pinned), ("vitruvian", "transformers"), ("vitruvian", "train")):
        held = found.get(canonicalize_name(name))
        for text in (held.requires if held else None) or ():
            needed = Requirement(text)
            if needed.marker is not None and not needed.marker.evaluate({"extra": extra}):
                continue
            other = found.get(canonicalize_name(needed.name))
            if other is None or not needed.specifier.contains(other.version, prereleases=True):
                wrong.append(f"{name} requires {text}, and there is {other.version if other else 'none'}")
    return wrong


def components(found: dict[str, Distribution]) -> list[dict[str, Any]]:
    """Python packages, and those of the system where it has dpkg."""
    listed = [
        {"type": "library", "name": name, "version": one.version, "purl": f"pkg:pypi/{name}@{one.version}"}
        for name, one in found.items()
    ]
    if which(DPKG[0]):
        ran = subprocess.run(DPKG, check=True, capture_output=True, text=True)  # noqa: S603
        for line in sorted(ran.stdout.splitlines()):
            name, version, machine = line.split("\t")
            purl = f"pkg:deb/debian/{name}@{version.replace('+', '%2B').replace(':', '%3A')}?arch={machine}"
            listed.append({"type": "library", "name": name, "version": version, "purl": purl})
    return listed


def main(lock: Path) -> None:
    """Check, then print."""
    found = installed()
    if wrong := faults(lock, found):
        sys.exit("\n".join(["sbom.py: the image is not what its lock says:", *wrong]))
    ours = found["vitruvian"].version
    document = {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {"component": {"type": "container", "name": "vitruvian", "version": ours}},
        "components": components(found),
    }  # fmt: skip
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
