"""python -m harness: what run.sh calls."""

from harness.cli.main import main

main()
