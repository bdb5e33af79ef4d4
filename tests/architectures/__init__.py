"""Every architecture of transformers that generates text, through FSDP and back (`make architectures`)."""
