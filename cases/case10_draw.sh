#!/usr/bin/env bash
# Draws case 10 from the CSV of case10_extract.sh; options --profile, --results and --out as for the case.
exec "$(dirname "${BASH_SOURCE[0]}")/../run.sh" case 10 --draw "$@"
