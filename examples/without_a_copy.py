"""From the Hub or a bucket to Megatron without a local copy: `without_a_copy.py hf://ORG/NAME OUT`, or `s3://…`."""

import sys

import vitruvian

source, out = sys.argv[1:]
checkpoint = vitruvian.open(source)  # headers only
print(f"{checkpoint.family}, {checkpoint.record['parameters']} parameters")
done = vitruvian.convert(source, out, to="megatron", tp=2)  # OUT may be in a store too
print(f"{done.tensors} tensors, digest {done.digest}")
