#!/usr/bin/env bash
# Draws case 8 from the CSV of case8_extract.sh; options --profile, --results and --out as for the case.
exec "$(dirname "${BASH_SOURCE[0]}")/../run.sh" case 8 --draw "$@"
