#!/usr/bin/env bash
# Draws case 2 from the CSV of case2_extract.sh; options --profile, --results and --out as for the case.
exec "$(dirname "${BASH_SOURCE[0]}")/../run.sh" case 2 --draw "$@"
