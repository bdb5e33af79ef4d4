"""Default cache folders: in the node's temporary folder, unless the job sets the variables itself.

Python imports this at its start in an image (caches.pth beside it). The definition's %environment cannot do it: it
runs without the variables of the job, and overrides them.
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
