#!/usr/bin/env bash
# The one door: sets up .venv if need be, then runs the harness. ./run.sh --help explains itself.
set -u
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh" ""
exec "$python" -m harness "$@"
