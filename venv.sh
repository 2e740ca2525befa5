# Sourced by run.sh and test.sh with extras of pyproject.toml or "": makes .venv from the lock in requirements/ where it
# is missing or stale, and sets $root and $python. An interrupted set-up leaves no stamp, so it is done again, from the
# start. Prints one line a phase; what uv or pip prints goes to .venv.log.

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
    cat "$root/pyproject.toml" "$root"/requirements/*.txt | cksum
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

failed() {  # in one line where the cause is known, else with the end of the output
    local cause free
    free=$(df -Pm "$root" | awk 'NR == 2 { print $4 }')
    if [ "$free" -lt 16 ] || grep -qE 'No space left|os error 28|Disk quota exceeded' "$log"; then
        cause="no room on a disk ($free MiB on that of .venv): make some"
    elif grep -qE 'Retry\(total=0|Max retries exceeded' "$log" && ! grep -q 'DO NOT MATCH THE HASHES' "$log"; then
        cause="an index cannot be reached: look at the network and at pip's configuration"
    else
        echo "error: set-up failed while $1; the whole output is in $log, its end is:" >&2
        tail -n 5 "$log" >&2
        echo "try again: the next call sets it up anew" >&2
        return 2
    fi
    echo "error: set-up failed while $1: $cause, then try again; the whole output is in $log" >&2
    return 2
}

setting() {  # setting NAME: of pip's, which uv does not read: from the environment, else of install, else of all commands
    local section
    for section in :env: install global; do
        sed -n "s/^$section\.$1=['\"]\(.*\)['\"]$/\1/p" <<< "$settings" | sed 's/\\n/ /g' | xargs | grep . && return
    done
}

with_uv() (  # uv, told what pip's configuration says
    settings=$("$python" -m pip config list 2>> "$log")
    given() { [ -z "$2" ] || [ -n "${!1:-}" ] || export "$1=$2"; }
    given UV_DEFAULT_INDEX "$(setting index-url)"
    given UV_INDEX "$(setting extra-index-url)"
    given SSL_CERT_FILE "$(setting cert)"
    if [ -z "${UV_FIND_LINKS:-}" ]; then
        read -ra links <<< "$(setting find-links)"
        for link in "${links[@]}"; do  # pip knows ~ and leaves out what is missing
            link=${link/#\~\//$HOME/}
            [[ $link != *://* && ! -e $link ]] || set -- --find-links "$link" "$@"
        done
    fi
    ! setting no-index | grep -qixE '1|y|yes|t|true|on' || set -- --no-index "$@"
    "$root/.venv/bin/uv" pip install --no-config --python "$python" --index-strategy unsafe-best-match --no-deps "$@" \
        >> "$log" 2>&1
)

# --use-pep517: a pip before 23.1, such as Debian 12's, else runs a source's setup.py where PYTHONSAFEPATH keeps it from
# the files beside it.
with_pip() {
    "$python" -m pip install --disable-pip-version-check --use-pep517 --no-deps "$@" >> "$log" 2>&1
}

has_cuda() {  # true if the torch that was installed is a CUDA build
    grep -qsE '^Requires-Dist: (nvidia|cuda)' "$root"/.venv/lib/python3*/site-packages/torch-*.dist-info/METADATA
}

# install_with COMMAND OPTION ...: what the lock lists for the extras, and nothing else, whatever a package says that it
# needs; then the project itself, editable.
install_with() {
    local lock=$root/requirements each lists
    lists=(-r "$lock/run.txt")
    for each in $extra; do
        lists+=(-r "$lock/$each.txt")
    done
    "$@" "${lists[@]}" && { ! has_cuda || "$@" -r "$lock/cuda.txt"; } && "$1" --no-build-isolation -e "$root"
}

install() {
    if ! with_pip --require-hashes -r "$root/requirements/uv.txt"; then
        echo "uv cannot be had (see $log)." >&2
    else
        echo "Installing packages with uv (half a minute; 1.6 GB without CUDA) ..." >&2
        # Compiled as pip does: where Python may write no bytecode, torch's import takes 7 seconds instead of 3.
        install_with with_uv --verify-hashes --compile-bytecode && return
        echo "uv failed (see $log)." >&2
    fi
    echo "Installing the same packages with pip (minutes; 1.6 GB without CUDA) ..." >&2
    install_with with_pip --require-hashes || failed "installing packages"
}

set_up() {
    local base
    base=$(base_python) || return 2
    extra=$(printf '%s\n' $extra $(installed) | sort -u | xargs)  # what is there stays
    : > "$log"
    if [ ! -e "$root/.venv/.stamp" ] || ! "$python" -m pip --version > /dev/null 2>&1; then
        echo "Making .venv with $base ..." >&2
        "$base" -m venv --clear "$root/.venv" >> "$log" 2>&1 || failed "making .venv" || return
    fi
    rm "$root/.venv/.stamp" 2> /dev/null
    install || return
    { echo "$(pins) $extra" > "$root/.venv/.stamp"; } 2>> "$log" || failed "writing its stamp" || return
    echo "Set-up is done." >&2
}

if ! is_set_up; then
    if ! cause=$({ : >> "$root/.venv.lock" && : >> "$log"; } 2>&1); then
        echo "error: set-up cannot write to $root:${cause##*:}; try a copy of the checkout" >&2
        exit 2
    fi
    exec 9> "$root/.venv.lock"
    if command -v flock > /dev/null; then
        flock -n 9 || { echo "Waiting for another set-up of .venv ..." >&2; flock 9; }  # two calls at once set up once
    fi
    if ! is_set_up; then
        trap 'echo "error: set-up interrupted; try again: the next call sets it up anew" >&2; exit 130' INT TERM
        set_up || exit 2
        trap - INT TERM
    fi
    exec 9>&-
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}  # where the checkout was moved, .venv leads to its old place
