"""What of the library hands tensors to torch, transformers and servers."""
