"""Where caches lie, unless the job says so itself: in the node's own folder for temporary files.

Python imports this at its start, in an image (caches.pth beside it). The definition's %environment could not do it: it
is run without the variables of the job, and wins over them.
"""

import os

CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "MIOPEN_USER_DB_PATH": "miopen",
    "MIOPEN_CUSTOM_CACHE_DIR": "miopen",
    "MPLCONFIGDIR": "matplotlib",
}

for name, folder in CACHES.items():
    os.environ.setdefault(name, f"{os.environ.get('TMPDIR', '/tmp')}/vitruvian-{os.getuid()}/{folder}")  # noqa: S108
