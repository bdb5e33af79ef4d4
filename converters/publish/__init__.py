"""Making a converted model ready for others: chat template, tokenizer, checks, and the Hub."""
