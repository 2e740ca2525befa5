#!/usr/bin/env bash
# Writes the CSV of case 6 from the records there are, and prints its path; --profile, --results, --out as for the case.
exec "$(dirname "${BASH_SOURCE[0]}")/../run.sh" case 6 --extract "$@"
