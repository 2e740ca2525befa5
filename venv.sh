# Sourced by run.sh and test.sh with an extra of pyproject.toml or "": makes .venv from the pinned dependencies
# where it is missing or stale, and sets $root and $python. An interrupted set-up leaves no stamp, so it is done again.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$root/.venv/bin/python
extra=$1

base_python() {
    local candidate
    for candidate in "${PYTHON:-python3.11}" python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 to 3.13 with venv found: install python3.11 and python3.11-venv, or name one: PYTHON=... $0" >&2
    return 2
}

stamp_is() {  # whether what is installed are the present pins, with at least this extra
    local pins
    pins=$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)
    [ "$(cat "$root/.venv/.stamp" 2>/dev/null)" = "$pins $1" ]
}

set_up() {
    local base dependencies
    base=$(base_python) || return 2
    echo "Setting up .venv with $base: once, some minutes, 1.6 GB without CUDA." >&2
    rm -f "$root/.venv/.stamp"
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        "$base" -m venv --clear "$root/.venv" >&2 || return 2
    fi
    dependencies=$("$python" - "$root/pyproject.toml" "$extra" <<'END'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
print("\n".join(project["dependencies"] + (project["optional-dependencies"][sys.argv[2]] if sys.argv[2] else [])))
END
    ) || return 2
    # shellcheck disable=SC2086
    if ! "$python" -m pip install --disable-pip-version-check -c "$root/constraints.txt" $dependencies >&2; then
        echo "error: set-up did not finish; the lines above say why, and the same call tries again" >&2
        return 2
    fi
    echo "$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum) $extra" > "$root/.venv/.stamp"
}

if ! stamp_is "$extra" && ! stamp_is test; then
    exec 9> "$root/.venv.lock"
    if command -v flock > /dev/null; then flock 9; fi  # two calls at once set up once
    if ! stamp_is "$extra" && ! stamp_is test; then
        trap 'echo "error: set-up interrupted; the same call goes on" >&2; exit 130' INT TERM
        set_up || exit 2
        trap - INT TERM
    fi
    exec 9>&-
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
