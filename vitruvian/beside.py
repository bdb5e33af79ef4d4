"""Import the packages that are installed beside this one, even if the current folder has others of the same names.

Python looks into the current folder first when it runs a module (`python -m`, a notebook): it would import a user's own
`train.py`, or folder `formats`, in place of Vitruvian's.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

HOME = Path(__file__).parents[1]
PACKAGES = ("formats", "converters", "train")


def load(name: str) -> ModuleType:
    """Import a module of Vitruvian's packages.

    Raises:
        ImportError: a foreign package of the same name was imported before.
    """
    for package in PACKAGES:
        _own(package)
    return import_module(name)


def _own(package: str) -> None:
    """Import a package from beside this one, or check that the imported one is that."""
    home = HOME / package / "__init__.py"
    loaded = sys.modules.get(package)
    if loaded is not None:
        if loaded.__file__ is None or not Path(loaded.__file__).samefile(home):
            where = loaded.__file__ or "a folder without __init__.py"
            raise ImportError(
                f"vitruvian needs its own package {package!r}, and another one is imported already: {where}. "
                f"Import vitruvian before it, or rename it."
            )
        return
    spec = spec_from_file_location(package, home, submodule_search_locations=[str(home.parent)])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[package] = module
    spec.loader.exec_module(module)
