"""Show that nothing was lost: digests, differences, checksums of archives."""
