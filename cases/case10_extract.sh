#!/usr/bin/env bash
# Writes the CSV of case 10 from the recorded runs and prints it; options --profile, --results and --out as for the case.
exec "$(dirname "${BASH_SOURCE[0]}")/../run.sh" case 10 --extract "$@"
