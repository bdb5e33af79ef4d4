"""What every checkpoint looks like on disk: layouts, families, readers and writers. No torch anywhere."""
