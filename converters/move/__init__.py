"""Move bytes: tiles, casts, replicas, checksums, the journal."""
