#!/usr/bin/env bash
# Creates the workstation's virtual environment, or updates it to requirements-dev.txt: venv.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
log=.tpu-launch/setup.log
mkdir -p -m 700 .tpu-launch
echo "making the virtual environment $venv (log: $log)"

install() {
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check --require-hashes --requirement requirements-dev.txt
    # setuptools came with the pins: nothing unpinned is fetched to build our own package.
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
}

if ! install >>"$log" 2>&1 </dev/null; then
    tail -n 30 "$log" >&2
    echo "the virtual environment could not be made; the whole log is $log" >&2
    exit 1
fi
