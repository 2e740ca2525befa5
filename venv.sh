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
    cat "$root/pyproject.toml" "$root/hashes.txt" | cksum
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

# Writes .venv/locked.txt: the files that pip would install, by hashes that hashes.txt lists. Of the packages named in
# HARNESS_UNHASHED, or of all, any file will do. --use-pep517: a pip before 23.1, such as Debian 12's, else runs a
# source's setup.py where PYTHONSAFEPATH keeps it from the files beside it.
lock() {
    "$python" -m pip install --disable-pip-version-check --use-pep517 --dry-run --ignore-installed \
        --report "$root/.venv/report.json" \
        -c <(sed 's/ *--hash.*//' "$root/hashes.txt") "$@" >> "$log" 2>&1 || failed "resolving packages" || return
    "$python" - "$root" "${HARNESS_UNHASHED:-}" > "$root/.venv/locked.txt" <<'END'
import json, pathlib, re, sys
root, free, known = pathlib.Path(sys.argv[1]), sys.argv[2].split(), {}
normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()
for line in (root / "hashes.txt").read_text().splitlines():
    known.setdefault(normal(re.split("[ =]", line)[0]), set()).update(re.findall("sha256:([0-9a-f]{64})", line))
for item in json.loads((root / ".venv/report.json").read_text())["install"]:
    name, version = normal(item["metadata"]["name"]), item["metadata"]["version"]
    archive = item["download_info"].get("archive_info", {})
    found = archive.get("hashes", {}).get("sha256") or archive.get("hash", "none").removeprefix("sha256=")
    if found not in known.get(name, ()) and not {name, "all"} & set(free):
        file = item["download_info"]["url"].rpartition("/")[2]
        sys.exit(f"error: expected a file of {name} {version} that hashes.txt lists, got {file} of sha256 {found[:12]}...;"
                 f" where you trust its maker, try HARNESS_UNHASHED={name} (names, or all)")
    print(f"{name}=={version} --hash=sha256:{found}")
END
}

install() {  # installs with uv where it is installed; with pip otherwise, or where uv fails (uv reads no pip.conf)
    local count words=(--no-deps --require-hashes -r "$root/.venv/locked.txt")
    echo "Resolving $# packages and their dependencies ..." >&2
    lock "$@" || return 2
    count=$(wc -l < "$root/.venv/locked.txt")
    if command -v uv > /dev/null; then
        echo "Installing $count packages with uv ..." >&2
        uv pip install --python "$python" "${words[@]}" >> "$log" 2>&1 && return
        echo "uv failed (see $log)." >&2
    fi
    echo "Installing $count packages with pip (minutes; 1.6 GB without CUDA) ..." >&2
    "$python" -m pip install --disable-pip-version-check --use-pep517 "${words[@]}" >> "$log" 2>&1 || failed "installing packages"
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
    install $dependencies || return
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
