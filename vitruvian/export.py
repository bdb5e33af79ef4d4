"""`python -m vitruvian.export`: one export of `converters.library.exporting`, in a process of its own."""

from __future__ import annotations

import json
import sys

import vitruvian


def main() -> None:
    """Convert, and push if that is asked for; a sentence on stderr and the exit code say what went wrong."""
    task = json.load(sys.stdin)
    try:
        done = vitruvian.convert(task["src"], task["out"], to="huggingface", **task["options"])
        branch = done.out.name
        url = vitruvian.push(done.out, task["push"], revision=branch).url if task["push"] else ""
    except vitruvian.VitruvianError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    sys.stdout.write(json.dumps({"digest": done.digest, "url": url}))


if __name__ == "__main__":
    main()
