#!/usr/bin/env bash
# Checks that the programs which a target needs are installed: need.sh [python] [containers] [gcloud] [kubectl]
#
# On Debian as root it installs missing programs; otherwise one message says what to install, and the exit code is 2.
set -euo pipefail
cd "$(dirname "$0")/.."
log=.tpu-launch/setup.log

python_is_installed() {
    "${PYTHON:-python3}" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Where an engine answers already (a remote one, Docker Desktop), dockerd is not needed on this machine.
engine_is_installed() {
    command -v docker >/dev/null && { command -v dockerd >/dev/null || docker version >/dev/null 2>&1; }
}

# Fills `missing` (messages) and `packages` (Debian's names).
find_missing() {
    missing=() packages=()
    for program in "$@"; do
        case $program in
            python)
                python_is_installed || { missing+=("Python 3.11 or newer with venv (Debian: python3-venv)"); packages+=(python3 python3-venv); } ;;
            containers)
                engine_is_installed || { missing+=("a container engine (Debian: docker.io)"); packages+=(docker.io iptables ca-certificates mmdebstrap); }
                { command -v ssh && command -v ssh-keygen; } >/dev/null || { missing+=("an OpenSSH client (Debian: openssh-client)"); packages+=(openssh-client); }
                ;;
            gcloud)
                command -v gcloud >/dev/null || missing+=("gcloud, the Google Cloud CLI (https://cloud.google.com/sdk/docs/install); no account is needed for a rehearsal") ;;
            kubectl)
                command -v kubectl >/dev/null || missing+=("kubectl, which tests of GKE use (https://kubernetes.io/docs/tasks/tools/); no cluster is needed") ;;
            *) echo "need.sh: unknown: $program" >&2; exit 2 ;;
        esac
    done
}

find_missing "$@"
if [ ${#packages[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    mkdir -p -m 700 .tpu-launch
    echo "installing ${packages[*]} (log: $log)"
    export DEBIAN_FRONTEND=noninteractive
    if ! { apt-get update && apt-get install -y --no-install-recommends "${packages[@]}"; } >>"$log" 2>&1 </dev/null; then
        tail -n 20 "$log" >&2
    fi
    hash -r
    find_missing "$@"
fi
if [ ${#missing[@]} -gt 0 ]; then
    {
        echo "This machine lacks:"
        printf '  - %s\n' "${missing[@]}"
        echo "Install it and run make again."
    } >&2
    exit 2
fi
