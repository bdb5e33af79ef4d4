"""Files of torch: zip archives, pickles, distributed checkpoints, dumps of each rank."""
