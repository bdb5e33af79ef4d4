"""Open two checkpoints in any formats, look at them, and compare: `open_and_compare.py ONE TWO`."""

import sys

import vitruvian

one, two = sys.argv[1:]
for path in (one, two):
    checkpoint = vitruvian.open(path)
    print(f"{path}: {checkpoint.family} as {checkpoint.format} {checkpoint.topology}")
found = vitruvian.diff(one, two)
print("equal" if found.equal else "\n".join([*found.settings, *(one.name for one in found.tensors)]))
