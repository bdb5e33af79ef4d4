"""GPT-NeoX: its layer files, its yml, the order of its grouped queries."""
