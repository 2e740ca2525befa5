#!/usr/bin/env bash
# All that needs a GPU, in calls of under 10 minutes: what matters most comes first, and the same call again measures
# only what is missing. Records, figures and the report land in RESULTS.
#   bench/gpu.sh [RESULTS]         with the python3 there is (PYTHON=... names another); default results/gpu
#   bench/gpu.sh --demo [RESULTS]  the same steps at tiny sizes on a CPU
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
limit=570
where=(--device cuda --device-memory 32GiB --timeout 150)
size=(-h 2048 -b 4 --steps 10 --warmup 4 --dtype bf16)
depths=(32 48 78 100)
layer=(-h 2048 -b 4)
windows=3,4
several=24 # layers of each of four models: 1.3 B parameters
search=(-h 2048 -b 4 --dtype bf16)
figures=(--profile quick --machine v100-vm)
if [ "${1:-}" = --demo ]; then
    shift
    limit=900
    where=(--device sim --device-memory 16MiB --host-memory 64MiB --timeout 60)
    size=(-h 64 -b 2 --heads 4 --seq 32 --vocab 512 --steps 6 --warmup 2 --dtype bf16)
    depths=(2 3 4 5)
    layer=(-h 64 -b 2 --heads 4 --seq 32)
    windows=1,2
    several=2
    search=(-h 128 --seq 64 --vocab 512 --dtype bf16)
    figures=(--profile demo)
fi
results=${1:-results/gpu}
mkdir -p "$results"
status=0

step() { # TITLE COMMAND...: the command, ended where the time is over
    local left=$((limit - SECONDS))
    echo "== $1 (at $SECONDS s)"
    shift
    if [ $left -lt 10 ]; then
        echo "   no time left: the same call goes on"
        return
    fi
    timeout --signal INT --kill-after 20 $left "$@" || status=$?
}
harness() { # TITLE VERB WORDS...
    step "$1" "$python" -m harness "${@:2}" --results "$results"
}

step "tests on the device, and of stream order" "$python" -m pytest -q tests/methods/test_gpu.py tests/run/test_trace.py tests/simulation/test_races.py
harness "rates, for the plans" doctor --calibrate "${layer[@]}" --dtype bf16
harness "beside resident" sweep -m resident,stronghold -l "${depths[0]}" "${size[@]}" "${where[@]}"
for depth in "${depths[2]}" "${depths[3]}" "${depths[1]}"; do
    harness "beyond the device: $depth layers" sweep -m stronghold,zero-offload,zero-infinity,fsdp2-offload \
        -l "$depth" "${size[@]}" "${where[@]}"
done
harness "one step at ${depths[3]} layers, stream by stream" run -m stronghold -l "${depths[3]}" "${size[@]}" "${where[@]}" \
    --trace "$results/trace.json"
harness "Hydra with one model" sweep -m hydra -l "${depths[1]},${depths[2]}" "${size[@]}" "${where[@]}"
harness "Hydra with four models" run -m hydra --models 4 -l "$several" "${size[@]}" "${where[@]}"
harness "the same without its double buffer" run -m hydra --models 4 --double-buffer off -l "$several" \
    "${size[@]}" "${where[@]}"
harness "the same with activations kept" run -m hydra --models 4 --option intermediates=saved -l "$several" \
    "${size[@]}" "${where[@]}"
harness "model selection beside one model after another" case 6 "${figures[@]}"
harness "every other method" sweep -m all -l "${depths[0]}" "${size[@]}" "${where[@]}"
harness "streaming alone, nothing resident" sweep -m stronghold -w "$windows" --option resident_layers=0 -l "${depths[0]}" \
    "${size[@]}" "${where[@]}"
harness "the largest size of every method" search largest -m all "${search[@]}" "${where[@]}"
harness "what hid behind what" case overlap "${figures[@]}"
harness "the figures" case all "${figures[@]}"
limit=$((limit + 30))
harness "the report" report
exit $status
