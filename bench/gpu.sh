#!/usr/bin/env bash
# A GPU borrowed for minutes, on a machine with Python, torch and perhaps no network, in calls of under ten minutes:
#   bench/gpu.sh 1 [RESULTS]          shows that it works: facts, tests, rates, each engine once; default results/gpu
#   bench/gpu.sh 2 [RESULTS]          the headline's sizes up to 48 layers; the same call goes on where it stopped
#   bench/gpu.sh 3 [RESULTS]          78 and 100 layers, a trace, the probes of the headline, Hydra, the largest sizes
#   bench/gpu.sh --demo [RESULTS]     all of it at tiny sizes on the simulated device
#   bench/gpu.sh --wheels DIR [NAME]  elsewhere, with a network: the wheels that such a machine lacks
# Each call leaves RESULTS.tar.gz in the folder OUT, else beside RESULTS, and first puts back what such an archive there,
# beside RESULTS or at the top of this tree holds. PYTHON names another python3, WHEELS another folder of wheels than wheels/.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python=${PYTHON:-python3}
wheels=${WHEELS:-wheels}
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} # one rank speaks to itself; some machines have no other
case "${1:-}" in
--wheels)
    shift
    exec "$python" -m bench.gpu_wheels "$@"
    ;;
--demo)
    set -- 1 "${2:-results/gpu-demo}" --demo --limit "${LIMIT:-900}"
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
