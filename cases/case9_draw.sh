#!/usr/bin/env bash
# Draws case 9 from the CSV of case9_extract.sh; options --profile, --results and --out as for the case.
exec "$(dirname "${BASH_SOURCE[0]}")/../run.sh" case 9 --draw "$@"
