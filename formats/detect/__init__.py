"""What a folder holds: two models at once, or what only looks like a format that has a reader."""
