#!/usr/bin/env bash
# Draws case 4 from the CSV of case4_extract.sh; options --profile, --results and --out as for the case.
exec "$(dirname "${BASH_SOURCE[0]}")/../run.sh" case 4 --draw "$@"
