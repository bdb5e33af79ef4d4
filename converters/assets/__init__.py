"""What travels with the weights: tokenizer, chat template, other files."""
