"""Pages that need nothing else: `plan --html`, `diff --html`, `inspect --html`."""
