#!/usr/bin/env bash
# The one door: sets up .venv if needed, then runs the harness. ./run.sh --help explains the rest.
set -u
. "$(dirname -- "${BASH_SOURCE[0]}")/venv.sh" ""
exec "$python" -m harness "$@"
