"""`python -m weightline` is the `weightline` command."""

from weightline.cli import main

main()
