#!/usr/bin/env bash
# pip_install.sh VENV LABEL PIP_ARGUMENTS...: one step of the setup, reported in one line with the time it took.
# Creates VENV with $PYTHON if it is missing. pip's output goes to VENV/setup.log. A known failure prints one
# line that says what to do, any other one the end of pip's output.
set -uo pipefail

PYTHON=${PYTHON:-python3}
VENV=$1 LABEL=$2
shift 2
LOG=$VENV/setup.log
TEMPORARY=${TMPDIR:-/tmp}

main() {
    [ -x "$VENV/bin/python" ] || check_python
    local started=$SECONDS
    printf '%-64s' "==> $LABEL"
    mkdir -p "$VENV" || fail "the folder $VENV cannot be created"
    # If pip is missing, the creation of the environment was interrupted.
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || run "$PYTHON" -m venv "$VENV"
    run "$VENV/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off "$@"
    printf '%4d s\n' $((SECONDS - started))
}

check_python() {
    supported "$PYTHON" && return
    local version name
    version=$("$PYTHON" --version 2>/dev/null) || version='not found'
    for name in python3.12 python3.11 python3.10 python3; do
        supported "$name" && fail "Python 3.10, 3.11 or 3.12 is needed; $PYTHON: $version. Use $name: make PYTHON=$name"
    done
    fail "Python 3.10, 3.11 or 3.12 is needed; $PYTHON: $version. Install one, then: make PYTHON=/path/to/python"
}

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null
}

# The output is also kept in memory, because a full disk has no room for a log.
run() {
    local output
    output=$("$@" 2>&1 | tee -a "$LOG" 2>/dev/null) || { echo; explain "$output"; }
}

explain() {
    local disk_full='No space left on device|Errno 28|Disk quota exceeded'
    local offline='ConnectionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|name resolution|Connection refused|Max retries'
    if [[ $1 =~ $disk_full ]] || [ "$(free_kb "$VENV")" -lt 10000 ] || [ "$(free_kb "$TEMPORARY")" -lt 10000 ]; then
        fail "the disk is full ($(($(free_kb "$VENV") / 1000)) MB free for $VENV, $(($(free_kb "$TEMPORARY") / 1000)) MB for $TEMPORARY;" \
            "about 3 GB are needed). Make room, or set VENV and TMPDIR to folders on another disk, and run make again"
    elif [[ $1 =~ $offline ]]; then
        local index=${PIP_INDEX_URL:-}
        index=${index/"//"*@/"//"} # without a password
        fail "pip cannot reach its package index${index:+ $index}. Check the network, the proxy and pip's settings" \
            "(pip config list), and run make again; $LOG has pip's output"
    elif [[ $1 =~ 'ensurepip is not available' ]]; then
        fail "$PYTHON cannot create virtual environments. On Debian and Ubuntu: apt-get install python3-venv"
    fi
    tail -n 20 <<<"$1" >&2
    fail "the lines above are the end of pip's output; $LOG has all of it"
}

free_kb() {
    df -Pk "$1" | awk 'NR == 2 { print $4 }'
}

fail() {
    printf 'setup failed: %s\n' "$*" >&2
    exit 1
}

main "$@"
