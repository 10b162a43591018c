"""`python -m ragen_apo.cli`, the same as `ragen-apo`."""

from ragen_apo.cli import main

main()
