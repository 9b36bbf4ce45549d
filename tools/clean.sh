#!/usr/bin/env bash
# Removes everything of tpu-launch on this machine, and checks the result: emulators' processes, every container, network and volume
# with one of our labels, sockets, and this checkout's .tpu-launch and caches. Prints what it removed; exits with 1 when something remains.
#
# The virtual environment and the images stay, because they are slow to make; IMAGES=1 removes the images too. Slices on Google
# Cloud are not touched: `tpu-launch down` deletes them.
set -euo pipefail
cd "$(dirname "$0")/.."

engine_answers() { docker version >/dev/null 2>&1; }

# Containers outlive the engine that ran them. Where no engine runs, start one while this script runs.
if ! engine_answers && [ -z "${CLEANING:-}" ] && [ -z "${DOCKER_HOST:-}" ] && [ "$(id -u)" = 0 ] && command -v dockerd >/dev/null; then
    CLEANING=1 ENGINE_ONLY=1 exec tools/with-engine.sh tools/clean.sh
fi

# Prints the process ids of emulators' servers of all homes.
server_pids() {
    local folder
    for folder in /proc/[0-9]*; do
        if tr '\0' ' ' <"$folder/cmdline" 2>/dev/null | grep -qE -- '-m launcher\.emulator\.server( |$)' && [ -O "$folder" ]; then
            basename "$folder"
        fi
    done
}

# Prints the ids of our objects of one kind (container, network, volume, image).
list_objects() {
    engine_answers || return 0
    case $1 in
        container) docker ps --all --format '{{.ID}} {{.Labels}}' | awk '/[ ,]tpu-launch\./ { print $1 }' ;;
        network) docker network ls --format '{{.ID}} {{.Labels}}' | awk '/[ ,]tpu-launch\./ { print $1 }' ;;
        volume) docker volume ls --format '{{.Name}} {{.Labels}}' | awk '/[ ,]tpu-launch\./ { print $1 }' ;;
        image) docker images --format '{{.Repository}}:{{.Tag}}' 'tpu-launch*/*' ;;
    esac
}

found=0
note() { echo "  $*"; found=1; }

for pid in $(server_pids); do
    note "process $pid: an emulator's server"
    kill -TERM "$pid" 2>/dev/null || true
done
for _ in $(seq 50); do
    [ -n "$(server_pids)" ] || break
    sleep 0.1
done
for pid in $(server_pids); do
    kill -KILL "$pid" 2>/dev/null || true
done

kinds=(container network volume)
[ -z "${IMAGES:-}" ] || kinds+=(image)
for kind in "${kinds[@]}"; do
    for object in $(list_objects "$kind"); do
        note "$kind $object"
        case $kind in
            container) docker rm --force --volumes "$object" >/dev/null ;;
            image) docker image rm --force "$object" >/dev/null ;;
            *) docker "$kind" rm "$object" >/dev/null ;;
        esac || true
    done
done
[ -z "${IMAGES:-}" ] || ! engine_answers || docker builder prune --force >/dev/null 2>&1 || true

# The engine's own folder is needed until the dockerd that make started is stopped.
for path in .tpu-launch/* "${XDG_RUNTIME_DIR:-/tmp}/tpu-launch-$(id -u)" "/tmp/tpu-launch-$(id -u)"; do
    if [ -e "$path" ] && [ "$path" != .tpu-launch/engine ]; then
        note "$path"
        rm -rf "$path"
    fi
done
rm -rf build dist ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
find launcher training tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
[ -s .tpu-launch/engine/dockerd.pid ] || rm -rf .tpu-launch

left=$(server_pids | sed 's/^/process /'; for kind in "${kinds[@]}"; do list_objects "$kind" | sed "s/^/$kind /"; done)
[ $found = 1 ] && echo "removed the above" || echo "nothing to remove"
if [ -n "$left" ]; then
    echo "still there:" >&2
    echo "$left" >&2
    exit 1
fi
engine_answers || echo "no container engine answers, so only processes and files were checked"
kept=$(docker images --format '{{.Repository}}:{{.Tag}}' 'tpu-launch*/*' 2>/dev/null | wc -l)
[ "$kept" = 0 ] || echo "kept: $kept images (make clean IMAGES=1 removes them too)"
echo "left of tpu-launch: no process, container, network or volume"
