#!/usr/bin/env bash
# Writes the lock anew after a change of pyproject.toml, in pip's format with hashes, for every platform and Python:
# run.txt, what running needs; extras.txt, what tests and the notebook need beyond; cuda.txt, what torch's CUDA build
# needs beyond; uv.txt, the installer. Versions that nothing changes stay. Needs a network and the .venv.
#   requirements/renew.sh [--upgrade] [WHEEL ...]
# WHEEL: files of torch's CPU builds, which have an index of their own; without any, those listed so far stay.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset UV_INDEX UV_DEFAULT_INDEX UV_FIND_LINKS  # an index with CPU builds would lock these for all
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
upgrade=()
if [ "${1:-}" = --upgrade ]; then upgrade=(--upgrade); shift; fi
cpu=$({ sed -n 's/^# torch on CPUs: //p' requirements/run.txt; [ $# -eq 0 ] || sha256sum "$@" | cut -d ' ' -f 1; } \
    | tr ' ' '\n' | sort -u | xargs)

compile() {  # compile OUTPUT SOURCE ...: one line a package; an output that is there says which versions stay
    local output=$1
    shift
    .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
        --default-index https://pypi.org/simple "${upgrade[@]}" -o "$output" "$@" > /dev/null
    sed -i -e ':a;/\\$/{N;s/ *\\\n */ /;ba}' "$output"
}

cat requirements/{run,extras,cuda}.txt > "$new/all" 2> /dev/null || true
cp requirements/uv.txt "$new/uv" 2> /dev/null || true
compile "$new/all" --all-extras pyproject.toml
cp "$new/all" "$new/run"
upgrade=()
compile "$new/run" pyproject.toml
compile "$new/uv" - <<< uv
sed -i "s/^torch==[^ ]*/& $(printf -- ' --hash=sha256:%s' $cpu)/; s/  */ /g" "$new/run"
{
    echo "# What running needs. Made by requirements/renew.sh."
    echo "# torch on CPUs: $cpu"
    grep -Ev '^(nvidia-(c|n)|cuda-|triton=)' "$new/run"
} > requirements/run.txt
{
    echo "# What torch's CUDA build needs beyond run.txt. Made by requirements/renew.sh."
    grep -E '^(nvidia-(c|n)|cuda-|triton=)' "$new/run"
} > requirements/cuda.txt
{
    echo "# What the tests and the notebook need beyond run.txt. Made by requirements/renew.sh."
    grep -vxFf "$new/run" "$new/all" | grep -v ^torch==
} > requirements/extras.txt
{
    echo "# The installer. Made by requirements/renew.sh."
    cat "$new/uv"
} > requirements/uv.txt
