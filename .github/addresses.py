"""`addresses.py URL TAG`, in a checkout that is built and thrown away: the addresses that only a release knows.

Links in README.md, which is the long description on PyPI, become absolute; pyproject.toml gets the project's URLs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def absolute(text: str, url: str, tag: str) -> str:
    """A text of the repository's root with links that work anywhere."""
    return LINK.sub(lambda one: f"{one[1]}[{one[2]}]({url}/{'raw' if one[1] else 'blob'}/{tag}/{one[3]})", text)


def with_urls(text: str, url: str) -> str:
    """pyproject.toml with the addresses of the project."""
    names = {"Homepage": url, "Issues": f"{url}/issues", "Changelog": f"{url}/blob/main/CHANGELOG.md"}
    lines = "".join(f'{name} = "{address}"\n' for name, address in names.items())
    return text.replace("[project.scripts]\n", f"[project.urls]\n{lines}\n[project.scripts]\n", 1)


def main() -> None:
    """Change both files."""
    url, tag = sys.argv[1:]
    readme, project = Path("README.md"), Path("pyproject.toml")
    readme.write_text(absolute(readme.read_text(), url, tag))
    project.write_text(with_urls(project.read_text(), url))


if __name__ == "__main__":
    main()
