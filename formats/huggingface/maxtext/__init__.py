"""MaxText: checkpoints of Orbax, whose arrays tensorstore reads."""
