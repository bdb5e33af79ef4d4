#!/usr/bin/env bash
# Runs inside the image while it is built: post.sh LOCK [OPTION OF PIP ...].
#
# A build without root (PRoot on LUMI, --fakeroot elsewhere) only emulates root: nothing here changes an owner,
# becomes another user or installs a package of the system. The builder's own /tmp and home are visible too: nothing
# there is changed.
set -euo pipefail
home=/opt/vitruvian
venv=$home/venv
lock=$home/lock.txt
recipe=$home/source/containers
cp "$recipe/locks/$1.txt" $lock
cp "$recipe/check.sh" "$recipe/sbom.py" $home
shift
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONNOUSERSITE=1 DS_BUILD_OPS=0 DS_ACCELERATOR=cpu
unset PYTHONPATH

# 1. A virtual environment. If the lock has no torch, that of the base image is used, unchanged.
python=python3
if ! grep -q '^torch==' $lock; then
    # The images of the LUMI AI Factory and of AMD keep torch in /opt/venv.
    for python in python3 /opt/venv/bin/python3 none; do
        if "$python" -c 'import torch' 2>/dev/null; then break; fi
    done
    [ "$python" != none ] || { echo "post.sh: the base image has no torch, and neither has the lock" >&2 && exit 1; }
fi
"$python" -m venv $venv
packages=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$recipe/caches.py" "$packages/vitruvian_caches.py"
echo "import vitruvian_caches" >"$packages/caches.pth"

# 2. The locked packages. setuptools comes first: it builds ours, and those that are published as source only.
sed -n '/^setuptools==/,/[^\\]$/p' $lock >$home/build.txt
$venv/bin/python -m pip install --quiet --no-deps --require-hashes "$@" -r $home/build.txt
$venv/bin/python -m pip install --quiet --no-deps --require-hashes --no-build-isolation --use-pep517 "$@" -r $lock
find $home/source -name __pycache__ -type d -prune -exec rm -r {} +
$venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --no-index $home/source
rm -r $home/source $home/build.txt
if ! grep -q '^torch==' $lock; then
    # Only now, or pip would count packages of the base as installed. The base is last on the path: ours override it.
    "$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' >"$packages/base.pth"
fi
$venv/bin/python -c 'import torch; print(torch.__version__)' >$home/torch.txt

# 3. Folders that the sites bind: a bind needs an existing place in a read-only image.
mkdir -p /appl /capstor /e /flash /gpfs /iopsstor /leonardo /leonardo_scratch /leonardo_work /p /pfs /project /projappl \
    /projects /scratch /scratch-shared /opt/cray /user-software /var/spool/slurmd

# 4. The list of packages, compared with the lock.
$venv/bin/python $home/sbom.py $home/lock.txt >$home/sbom.json
