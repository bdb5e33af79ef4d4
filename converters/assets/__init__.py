"""What travels with the weights: tokenizer, chat template, other files; which of them may be copied."""
