"""An output that goes into a store: written file by file on this machine, sent, verified there, and published."""
