"""python -m harness: what run.sh calls."""

from harness.cli import main

main()
