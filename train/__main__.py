"""`python -m train`, and `torchrun -m train`."""

from train.cli import main

main()
