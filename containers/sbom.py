"""Write the packages of an image as a CycloneDX 1.6 document to stdout: `python sbom.py LOCK`.

It exits with an error if a package of the lock is missing, has another version, or lacks a requirement.
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
    """Every importable distribution by name: the first one on the path."""
    packages: dict[str, Distribution] = {}
    for distribution in distributions():
        packages.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution)
    return dict(sorted(packages.items()))


def faults(lock: Path, packages: dict[str, Distribution]) -> list[str]:
    """Packages that do not match the lock, and requirements of them and of ours that are not met."""
    pinned = dict(match.groups() for line in lock.read_text().splitlines() if (match := PINNED.match(line)))
    wrong = []
    for name, version in pinned.items():
        package = packages.get(canonicalize_name(name))
        if package is None or package.version != version:
            wrong.append(f"{name} is {package.version if package else 'missing'}, the lock says {version}")
    for name, extra in (*((name, "") for name in pinned), ("vitruvian", "transformers"), ("vitruvian", "train")):
        package = packages.get(canonicalize_name(name))
        for text in (package.requires if package else None) or ():
            needed = Requirement(text)
            if needed.marker is not None and not needed.marker.evaluate({"extra": extra}):
                continue
            other = packages.get(canonicalize_name(needed.name))
            if other is None or not needed.specifier.contains(other.version, prereleases=True):
                wrong.append(f"{name} requires {text}, and there is {other.version if other else 'none'}")
    return wrong


def components(packages: dict[str, Distribution]) -> list[dict[str, Any]]:
    """Python packages, and packages of the system if it has dpkg."""
    listed = [
        {
            "type": "library",
            "name": name,
            "version": distribution.version,
            "purl": f"pkg:pypi/{name}@{distribution.version}",
        }
        for name, distribution in packages.items()
    ]
    if which(DPKG[0]):
        listing = subprocess.run(DPKG, check=True, capture_output=True, text=True)  # noqa: S603
        for line in sorted(listing.stdout.splitlines()):
            name, version, machine = line.split("\t")
            purl = f"pkg:deb/debian/{name}@{version.replace('+', '%2B').replace(':', '%3A')}?arch={machine}"
            listed.append({"type": "library", "name": name, "version": version, "purl": purl})
    return listed


def main(lock: Path) -> None:
    """Check, then print."""
    packages = installed()
    if wrong := faults(lock, packages):
        sys.exit("\n".join(["sbom.py: the image is not what its lock says:", *wrong]))
    ours = packages["vitruvian"].version
    document = {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {"component": {"type": "container", "name": "vitruvian", "version": ours}},
        "components": components(packages),
    }  # fmt: skip
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
