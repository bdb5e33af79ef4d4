"""Move bytes: tiles, casts, replicas, checksums, processes, the journal."""
