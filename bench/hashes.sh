#!/usr/bin/env bash
# Renews hashes.txt: every file of every version that constraints.txt pins, as the package index lists them, with what
# torch's CUDA build pulls in. Needs uv and a network.
#   bench/hashes.sh [WHEEL ...]
# WHEEL: files of torch's CPU builds, which have an index of their own; without any, those listed so far stay.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ $# -gt 0 ]; then
    cpu=$(sha256sum "$@" | sed 's/^\([0-9a-f]*\).*/--hash=sha256:\1/')
else
    cpu=$(sed -n 's/^# torch on CPUs: //p' hashes.txt)
fi
cpu=$(echo $cpu)
new=$(uv pip compile --quiet --universal --python-version 3.11.5 --generate-hashes --no-annotate --no-header --all-extras \
    -c constraints.txt pyproject.toml | sed -e ':a;/\\$/{N;s/ *\\\n */ /;ba}' -e "s/^torch==[^ ]*/& $cpu/")
{
    echo "# The files that set-up may install, by their hashes, for Linux and macOS. Made by bench/hashes.sh."
    echo "# torch on CPUs: $cpu"
    echo "$new"
} > hashes.txt
