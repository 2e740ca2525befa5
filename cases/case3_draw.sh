#!/usr/bin/env bash
# Draws case 3 from the CSV of case3_extract.sh; options --profile, --results and --out as for the case.
exec "$(dirname "${BASH_SOURCE[0]}")/../run.sh" case 3 --draw "$@"
