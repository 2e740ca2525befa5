#!/usr/bin/env bash
# All that needs a GPU, in one call of under 10 minutes; called again, it measures only what is missing.
#   bench/gpu.sh [RESULTS]         with the python3 there is (PYTHON=... names another); default results/gpu
#   bench/gpu.sh --demo [RESULTS]  the same steps at tiny sizes on a CPU
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
where=(--device cuda --device-memory 32GiB --timeout 150)
sizes=(-l "16,32,48" -h 2048 -b 4 --steps 10 --warmup 4)
search=(-h 2048 -b 4)
figures=(--profile quick --machine v100-vm --budget 4m)
if [ "${1:-}" = --demo ]; then
    shift
    where=(--device sim --device-memory 16MiB --host-memory 64MiB --timeout 60)
    sizes=(-l "2,4" -h 64 -b 2 --heads 4 --seq 32 --vocab 512 --steps 6 --warmup 2)
    search=(-h 128 --seq 64 --vocab 512)
    figures=(--profile demo --budget 1m)
fi
results=${1:-results/gpu}
status=0

echo "== tests on the device, and of stream order"
"$python" -m pytest -q tests/test_gpu.py tests/test_races.py || status=1

echo "== every method, bf16"
"$python" -m harness sweep -m all "${sizes[@]}" --dtype bf16 "${where[@]}" --results "$results" || status=$?
echo "== nothing but the window on the device: what streaming alone costs; fp32 beside it"
"$python" -m harness sweep -m stronghold -w 3,4 --option resident_layers=0 "${sizes[@]}" --dtype bf16 "${where[@]}" \
    --results "$results" || status=$?
"$python" -m harness sweep -m resident,stronghold "${sizes[@]}" --dtype fp32 "${where[@]}" --results "$results" || status=$?
echo "== the largest size of every method"
"$python" -m harness search largest -m all "${search[@]}" --dtype bf16 "${where[@]}" --results "$results" || status=$?
echo "== the six figures"
"$python" -m harness case all "${figures[@]}" --results "$results" || status=$?
"$python" -m harness report --results "$results" || status=$?
exit $status
