#!/usr/bin/env bash
# Draws case 1 from the CSV of case1_extract.sh; options --profile, --results and --out as for the case.
exec "$(dirname "${BASH_SOURCE[0]}")/../run.sh" case 1 --draw "$@"
