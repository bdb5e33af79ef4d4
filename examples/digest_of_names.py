"""One number for one model, by its name on the Hub if the cache or a mirror has it: `digest_of_names.py NAME …`."""

import sys

import vitruvian

for name in sys.argv[1:]:
    print(vitruvian.digest(name).digest, name)
