#!/usr/bin/env bash
# The published artifact's call, with its settings: ./examples/run.sh -m METHOD [-l N] [-h N] [-b N] [-w N]
exec "$(dirname "${BASH_SOURCE[0]}")/../run.sh" --as sc22 "$@"
