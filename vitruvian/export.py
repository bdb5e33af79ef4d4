"""`python -m vitruvian.export`: one export of `converters.library.exporting`, in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import vitruvian


def main() -> None:
    """Convert, unless that is done, and push if asked to; stderr and the exit code report an error."""
    task = json.load(sys.stdin)
    try:
        out, digest, notes = Path(task["out"]), task["digest"], tuple[str, ...]()
        if digest is None:
            done = vitruvian.convert(task["src"], out, to="huggingface", **task["options"])
            digest, notes = done.digest, done.notes
        url = vitruvian.push(out, task["push"], revision=out.name).url if task["push"] else ""
    except vitruvian.VitruvianError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    sys.stdout.write(json.dumps({"digest": digest, "url": url, "notes": notes}))


if __name__ == "__main__":
    main()
