"""What a model is, in no framework's terms: its settings, its vocabulary rows; models without a table."""
