#!/usr/bin/env bash
# The tests; sets up .venv if needed, with the test extra. Two test processes: most of a test is the start of a process.
# A third one with --all, which waits a lot: for Slurm, containers and time limits.
#   ./test.sh [PYTEST'S ARGUMENTS]         all but the heavy tests: about 4 minutes; installs and starts nothing
#   ./test.sh --all [PYTEST'S ARGUMENTS]   all of them: about 20 minutes
set -u
processes=2
if [ "${1:-}" = --all ]; then
    cat >&2 <<'END'
All tests. As root on Debian this installs docker.io, mmdebstrap, slurmctld, slurmd, slurm-client, slurmdbd, munge,
mariadb-server, runc, libaio-dev and chromium where they are missing; elsewhere the tests that need them are skipped.
It starts a container engine and Slurm clusters of its own, and stops them; compiles DeepSpeed's kernels (minutes,
once); sets up a second .venv in a temporary folder. Without: ./test.sh
END
    processes=3
fi
. "$(dirname -- "${BASH_SOURCE[0]}")/venv.sh" test
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes would compile the project's own files, and pytest all tests
cd "$root" && exec "$python" -m pytest -n $processes --dist worksteal "$@"
