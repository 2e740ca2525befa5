#!/usr/bin/env bash
# The tests: sets up .venv with the test extra if need be, then runs pytest with the arguments given, two at once:
# most of a test is the start of a process.
set -u
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh" test
cd "$root" && exec "$python" -m pytest -n 2 --dist worksteal "$@"
