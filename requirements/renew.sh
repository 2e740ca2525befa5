#!/usr/bin/env bash
# Writes the lock anew after a change of pyproject.toml, in pip's format with hashes, for every platform and Python:
# run.txt, what running needs; test.txt, notebook.txt and kubernetes.txt, what these extras need beyond; cuda.txt, what
# torch's CUDA build needs beyond; uv.txt, the installer. Versions that nothing changes stay. Needs a network and .venv.
#   requirements/renew.sh [--upgrade] [WHEEL ...]
# WHEEL: files of torch's CPU builds, which have an index of their own; without any, those listed stay with their torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset UV_INDEX UV_EXTRA_INDEX_URL UV_DEFAULT_INDEX UV_FIND_LINKS  # an index with CPU builds would lock these for all
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
upgrade=()
if [ "${1:-}" = --upgrade ]; then upgrade=(--upgrade); shift; fi

compile() {  # compile OUTPUT SOURCE ...: one line a package; an output that is there says which versions stay
    local output=$1
    shift
    .venv/bin/uv pip compile --no-config --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
        --no-header --default-index https://pypi.org/simple "${upgrade[@]}" -o "$output" "$@" > /dev/null
    sed -i -e ':a;/\\$/{N;s/ *\\\n */ /;ba}' "$output"
}

torch() { grep -o '^torch==[^ ]*' "$1" || true; }

cpu=$(sed -n 's/^# torch on CPUs: //p' requirements/run.txt)
sort -u requirements/{run,test,notebook,kubernetes,cuda}.txt > "$new/all" 2> /dev/null || true
for hash in $cpu; do sed -i "s/ --hash=sha256:$hash//g" "$new/all"; done  # uv keeps the hashes that it finds
cp requirements/uv.txt "$new/uv" 2> /dev/null || true
compile "$new/all" --all-extras pyproject.toml
upgrade=()
for extra in run test notebook kubernetes; do
    cp "$new/all" "$new/$extra"
    compile "$new/$extra" $([ $extra = run ] || echo "--extra $extra") pyproject.toml
done
compile "$new/uv" - <<< uv
if [ $# -gt 0 ]; then
    cpu=$(sha256sum "$@" | cut -d ' ' -f 1 | sort -u | xargs)
elif [ "$(torch "$new/run")" != "$(torch requirements/run.txt)" ]; then
    echo "$(torch "$new/run") has other CPU builds than those listed: name their files, renew.sh WHEEL ..." >&2
    cpu=
fi
{
    echo "# What running needs. Made by requirements/renew.sh."
    echo "# torch on CPUs: $cpu"
    grep -Ev '^(nvidia-(c|n)|cuda-|triton=)' "$new/run" \
        | sed "s/^torch==[^ ]*/&$([ -z "$cpu" ] || printf -- ' --hash=sha256:%s' $cpu)/"
} > requirements/run.txt
{
    echo "# What torch's CUDA build needs beyond run.txt. Made by requirements/renew.sh."
    grep -E '^(nvidia-(c|n)|cuda-|triton=)' "$new/run"
} > requirements/cuda.txt
for extra in test notebook kubernetes; do
    {
        echo "# What the extra $extra needs beyond run.txt. Made by requirements/renew.sh."
        grep -vxFf "$new/run" "$new/$extra"
    } > "requirements/$extra.txt"
done
{
    echo "# The installer. Made by requirements/renew.sh."
    cat "$new/uv"
} > requirements/uv.txt
