"""`python -m ragen_apo`, the same as `ragen-apo`; torchrun starts a module."""

from ragen_apo.cli import main

main()
