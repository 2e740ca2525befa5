#!/usr/bin/env bash
# The tests; sets up .venv if needed, with the test extra. Three test processes: many tests wait, for a process that
# starts, a container or a cluster.
#   ./test.sh [PYTEST'S ARGUMENTS]         each main fact and all that is quick; installs nothing
#   ./test.sh --all [PYTEST'S ARGUMENTS]   all tests
#   ./test.sh -n 0 TEST                    one test by its name, as a failed one's last line tells
set -u
if [ "${1:-}" = --all ]; then
    cat >&2 <<'END'
All tests. As root on Debian this installs docker.io, mmdebstrap, slurmctld, slurmd, slurm-client, slurmdbd, munge,
mariadb-server, runc, libaio-dev and chromium where they are missing; elsewhere the tests that need them are skipped.
It starts a container engine and Slurm clusters of its own, and stops them; compiles DeepSpeed's kernels (minutes,
once); sets up a second .venv in a temporary folder. Without: ./test.sh
END
fi
. "$(dirname -- "${BASH_SOURCE[0]}")/venv.sh" "test kubernetes"
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes would compile the project's own files, and pytest all tests
cd "$root" && exec "$python" -m pytest -n 3 --dist worksteal "$@"
