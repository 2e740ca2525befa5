#!/usr/bin/env bash
# Draws case 5 from the CSV of case5_extract.sh; options --profile, --results and --out as for the case.
exec "$(dirname "${BASH_SOURCE[0]}")/../run.sh" case 5 --draw "$@"
