"""Check the room for an output: bytes and files, on its file system and in quotas of Lustre and of JSC's GPFS."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from converters.common.progress import size
from formats.errors import OutputError

SECONDS = 20
"""Time limit of a command that asks a file system, which may be busy."""
NONE = 1 << 62


class FreeSpace(NamedTuple):
    """How much may still be written.

    Attributes:
        nbytes: free bytes.
        files: free files and folders; a very large number where there is no limit.
        of: the file system or quota that has the limit.
    """

    nbytes: int
    files: int
    of: str


def require_space(place: Path, nbytes: int, files: int, out: Path) -> None:
    """Refuse an output for which there is no room.

    Args:
        place: an existing folder on the file system that is written to.
        nbytes: bytes that are needed.
        files: files and folders that are needed.
        out: the output.

    Raises:
        OutputError: there is less room.
    """
    for room in free_spaces(place):
        if nbytes > room.nbytes:
            raise OutputError(f"{out} needs {size(nbytes)}, {room.of} has {size(room.nbytes)} free")
        if files > room.files:
            raise OutputError(
                f"{out} needs {files} files and folders, {room.of} has {room.files} free",
                "remove files that are not needed, or choose another file system",
            )


def free_spaces(place: Path) -> Iterator[FreeSpace]:
    """The room that the file system of a folder has, and the room that each of its quotas leaves."""
    stats = os.statvfs(place)
    yield FreeSpace(stats.f_bavail * stats.f_frsize, stats.f_favail if stats.f_files else NONE, str(place))
    quotas = {"lustre": _lustre, "gpfs": _jutil}.get(mounted(place))
    if quotas:
        yield from quotas(place)


def mounted(place: Path) -> str:
    """The type of the file system that a folder is on; empty where /proc/mounts cannot be read."""
    try:
        lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    mounts = [(len(where), kind) for _, where, kind, *_ in lines if place.resolve().is_relative_to(_plain(where))]
    return max(mounts)[1] if mounts else ""


def _plain(where: str) -> str:
    """A path of /proc/mounts with its octal escapes of blanks decoded (proc(5))."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), where)


def _lustre(place: Path) -> Iterator[FreeSpace]:
    """The room in the Lustre quotas of user, group and project that apply to new files in a folder.

    `lfs quota -q` prints path, kilobytes, quota, limit, grace, files, quota, limit, grace; 0 is no limit, a star
    follows a number above its quota. `lfs project -d` prints the project's number first (lfs-quota(1), lfs-project(1)
    of Lustre 2.15).
    """
    status = place.stat()
    answer = command_output("lfs", "project", "-d", str(place)).split()
    project = answer[0] if answer and answer[0].isdigit() and answer[0] != "0" else ""
    owners = {"user": str(os.getuid()), "group": str(status.st_gid), "project": project}
    for kind, number in owners.items():
        words = command_output("lfs", "quota", "-q", f"-{kind[0]}", number, str(place)).split() if number else []
        numbers = [word.rstrip("*") for word in words[-8:]]
        if len(numbers) != 8 or not all(numbers[index].isdigit() for index in (0, 2, 4, 6)):
            continue
        kilobytes, most, files, most_files = (int(numbers[index]) for index in (0, 2, 4, 6))
        yield FreeSpace(
            1024 * max(0, most - kilobytes) if most else NONE,
            max(0, most_files - files) if most_files else NONE,
            f"the quota of {kind} {number} on {place}",
        )


def _jutil(place: Path) -> Iterator[FreeSpace]:
    """The room in the quota of the JSC project whose folder this is in, as of some hours ago.

    A project's folders are `/e/project1/PROJECT`, `/p/scratch/PROJECT` and the like. `jutil` prints a list of objects
    with `project-dir`, `data-usage`, `data-hard-limit` (`17KB`), `inode-usage`, `inode-hard-limit`, where 0 is no
    limit, as the quota parsers of ECMWF's Anemoi read it. Not tried on the machine.
    """
    place = place.resolve()
    project = place.parts[3] if len(place.parts) > 3 else ""
    answer = command_output("jutil", "project", "dataquota", "-p", project, "-o", "json", "-U", "KB") if project else ""
    try:
        projects = [quota for quota in json.loads(answer) if place.is_relative_to(quota["project-dir"])]
        for quota in projects:
            kilobytes, most = (int(str(quota[name]).removesuffix("KB")) for name in ("data-usage", "data-hard-limit"))
            files, most_files = (int(quota[name]) for name in ("inode-usage", "inode-hard-limit"))
            yield FreeSpace(
                1024 * max(0, most - kilobytes) if most else NONE,
                max(0, most_files - files) if most_files else NONE,
                f"the quota of project {project} on {quota['project-dir']}",
            )
    except (ValueError, KeyError, TypeError):  # nothing was printed, or something else
        return


def command_output(*words: str) -> str:
    """The output of a command; empty where the command does not exist, or fails."""
    if shutil.which(words[0]) is None:
        return ""
    import subprocess

    try:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return ""
    return "" if ran.returncode else ran.stdout
