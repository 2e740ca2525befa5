# Sourced by run.sh and test.sh with extras of pyproject.toml or "": makes .venv from the pinned dependencies
# where it is missing or stale, and sets $root and $python. An interrupted set-up leaves no stamp, so it is done again.
# Prints one line a phase; what uv or pip prints goes to .venv.log.

# The folder of the call may hold anything, such as a torch.py in an unpacked archive: never import from there.
export PYTHONSAFEPATH=1
root=$(CDPATH= cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)  # CDPATH would send a relative cd elsewhere
python=$root/.venv/bin/python
extra=$1
log=$root/.venv.log

base_python() {
    local candidate
    for candidate in "${PYTHON:-python3.11}" python3.11 python3.12 python3.13 python3; do
        if "$candidate" -I -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 to 3.13 with venv found: install python3.11 and python3.11-venv, or name one: PYTHON=... $0" >&2
    return 2
}

pins() {
    cat "$root/pyproject.toml" "$root/constraints.txt" | cksum
}

installed() {  # the extras that are installed by the present pins; fails where none of these is
    local stamp
    stamp=$(cat "$root/.venv/.stamp" 2>/dev/null)
    [ "${stamp#"$(pins)"}" != "$stamp" ] && echo "${stamp#"$(pins)"}"
}

is_set_up() {  # true if the present pins are installed, with all extras that were asked for
    local there each
    there=$(installed) || return
    for each in $extra; do
        case " $there " in *" $each "*) ;; *) return 1 ;; esac
    done
}

failed() {
    echo "error: set-up failed while $1; the whole output is in $log, its end is:" >&2
    tail -n 5 "$log" >&2
    echo "try again: the same call continues" >&2
    return 2
}

install() {  # installs with uv where it is installed; with pip otherwise, or where uv fails (uv reads no pip.conf)
    local count=$#
    if command -v uv > /dev/null; then
        echo "Installing $count packages and their dependencies with uv ..." >&2
        uv pip install --python "$python" -c "$root/constraints.txt" "$@" >> "$log" 2>&1 && return
        echo "uv failed (see $log)." >&2
    fi
    echo "Installing $count packages and their dependencies with pip (minutes; 1.6 GB without CUDA) ..." >&2
    "$python" -m pip install --disable-pip-version-check -c "$root/constraints.txt" "$@" >> "$log" 2>&1
}

set_up() {
    local base dependencies
    base=$(base_python) || return 2
    extra=$(printf '%s\n' $extra $(installed) | sort -u | xargs)  # what is there stays
    rm -f "$root/.venv/.stamp"
    : > "$log"
    if ! "$python" -m pip --version > /dev/null 2>&1; then
        echo "Making .venv with $base ..." >&2
        "$base" -m venv --clear "$root/.venv" >> "$log" 2>&1 || failed "making .venv" || return
    fi
    dependencies=$("$python" - "$root/pyproject.toml" "$extra" <<'END'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extras = [project["optional-dependencies"][name] for name in sys.argv[2].split()]
print("\n".join(sum(extras, project["dependencies"])))
END
    ) || return 2
    # shellcheck disable=SC2086
    install $dependencies || failed "installing packages" || return
    echo "$(pins) $extra" > "$root/.venv/.stamp"
    echo "Set-up is done." >&2
}

if ! is_set_up; then
    exec 9> "$root/.venv.lock"
    if command -v flock > /dev/null; then
        flock -n 9 || { echo "Waiting for another set-up of .venv ..." >&2; flock 9; }  # two calls at once set up once
    fi
    if ! is_set_up; then
        trap 'echo "error: set-up interrupted; try again: the same call continues" >&2; exit 130' INT TERM
        set_up || exit 2
        trap - INT TERM
    fi
    exec 9>&-
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
