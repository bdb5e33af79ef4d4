"""What a conversion would write and change, before a byte is read: `plan_before.py SRC`."""

import sys

import vitruvian

plan = vitruvian.plan(sys.argv[1], to="huggingface", dtype="fp16", shard_size=100_000)
for file, nbytes in plan.files.items():
    print(f"{nbytes:>10} {file}")
print("changes:", plan.changes or "none, all bits are kept")
for note in plan.notes:
    print("note:", note)
