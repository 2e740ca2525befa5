#!/usr/bin/env bash
# A GPU borrowed for minutes, on a machine with Python, torch and perhaps no network, in calls of under ten minutes:
#   bench/gpu.sh [NAME]               does the steps of bench/gpu.py that are left; records in results/NAME, default gpu
#   bench/gpu.sh [NAME] --limit 545   in so many seconds; the next call goes on where this one stops
#   bench/gpu.sh [NAME] --only TITLE  one step alone, and again
#   bench/gpu.sh --demo [NAME]        all of it at tiny sizes on the simulated device
#   bench/gpu.sh --wheels DIR [NAME]  elsewhere, with a network: the wheels that such a machine lacks
# Each call leaves NAME.tar.gz in the folder OUT, else in results/, and first puts back what such an archive there, in
# results/ or at the top of this tree holds. PYTHON names another python3, WHEELS another folder of wheels than wheels/.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python=${PYTHON:-python3}
wheels=${WHEELS:-wheels}
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# One rank speaks to itself. Some machines have no other interface, and without DNS gloo waits for the host's name.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
case "${1:-}" in
--wheels)
    folder=${2:?expected a folder: bench/gpu.sh --wheels DIR}
    pinned() { for name; do grep -hoEm1 "^$name==[^ ]+" requirements/run.txt || exit 2; done; }
    # For Python 3.12 beside a torch of its own. DeepSpeed has no wheel: its is made from its source, without kernels.
    source=$(pinned deepspeed) || exit 2
    wheels=$(pinned megatron-core hjson pydantic pydantic-core annotated-types typing-inspection typing-extensions \
        "${@:3}") || exit 2
    mkdir -p "$folder" && rm -f "$folder"/*.whl
    pip="$python -m pip --quiet --disable-pip-version-check"
    # shellcheck disable=SC2086
    $pip wheel --no-deps --no-build-isolation --no-binary :all: --wheel-dir "$folder" $source &&
        $pip download --no-deps --only-binary :all: --python-version 3.12 --implementation cp \
            --platform=manylinux{_2_28,_2_24,_2_17,2014,1}_x86_64 --dest "$folder" $wheels
    exit
    ;;
--demo)
    set -- "${2:-gpu-demo}" --demo --limit "${LIMIT:-900}"
    ;;
*)
    if compgen -G "$wheels/*.whl" > /dev/null; then
        site=$(mktemp -d) || exit 2
        trap 'rm -rf "$site"' EXIT
        "$python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$wheels" --no-deps \
            --no-compile --target "$site" "$wheels"/*.whl || exit 2
        export PYTHONPATH=$PWD:$site${PYTHONPATH#"$PWD"}
    fi
    ;;
esac
"$python" -m bench.gpu "$@"
