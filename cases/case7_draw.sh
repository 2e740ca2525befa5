#!/usr/bin/env bash
# Draws case 7 from the CSV of case7_extract.sh; options --profile, --results and --out as for the case.
exec "$(dirname "${BASH_SOURCE[0]}")/../run.sh" case 7 --draw "$@"
