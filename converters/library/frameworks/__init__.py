"""What of the library hands tensors to torch and transformers."""
