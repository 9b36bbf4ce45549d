#!/usr/bin/env bash
# Runs a command with a container engine and the base image available: with-engine.sh COMMAND...
#
# If no engine answers, dockerd is started, and it is stopped again when the last command of this checkout that uses it has ended, also
# after a failure or Ctrl-C. An engine that was already there is left alone. ENGINE_ONLY=1 leaves the base image out.
set -euo pipefail
cd "$(dirname "$0")/.."
state=.tpu-launch/engine
pid_file=$state/dockerd.pid
log=$state/dockerd.log
mkdir -p -m 700 .tpu-launch
mkdir -p "$state"

answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

# The process id of the dockerd that a command of this checkout started, if it still runs.
own_pid() {
    [ -s "$pid_file" ] && [ "$(cat "/proc/$(<"$pid_file")/comm" 2>/dev/null)" = dockerd ] && cat "$pid_file"
}

start() {
    answers && return
    if [ -n "${DOCKER_HOST:-}" ]; then
        echo "no container engine answers at DOCKER_HOST=$DOCKER_HOST: start it, or unset DOCKER_HOST" >&2
        return 2
    fi
    if [ "$(id -u)" != 0 ] || ! command -v dockerd >/dev/null; then
        echo "no container engine answers: start one (systemctl start docker), and let your user use it (the group docker)" >&2
        return 2
    fi
    setsid nohup dockerd >"$log" 2>&1 </dev/null 8>&- 9>&- &
    local pid=$!
    echo "$pid" >"$pid_file"
    for _ in $(seq 600); do
        answers && { echo "started dockerd (process $pid, log: $log)"; return; }
        kill -0 "$pid" 2>/dev/null || { tail -n 20 "$log" >&2; echo "dockerd ended at once; its log is $log" >&2; return 1; }
        sleep 0.1
    done
    tail -n 20 "$log" >&2
    echo "dockerd did not answer within 60 s; its log is $log" >&2
    return 1
}

stop() {
    exec 8>&-                                # this command no longer uses the engine
    exec 9>"$state/change.lock"
    flock 9                                  # no other command starts it meanwhile
    local pid
    pid=$(own_pid) || return 0
    exec 8>"$state/users.lock"
    flock --nonblock 8 || return 0           # another command still uses it, and will stop it
    kill -TERM "$pid" 2>/dev/null || true
    for _ in $(seq 600); do
        own_pid >/dev/null || { rm -f "$pid_file"; echo "stopped dockerd"; return 0; }
        sleep 0.1
    done
    echo "dockerd (process $pid) did not stop within 60 s; its log is $log" >&2
    return 1
}

finish() {
    local status=$?
    trap '' INT TERM
    stop || { [ $status != 0 ] || status=1; }
    exit $status
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

exec 8>"$state/users.lock" 9>"$state/change.lock"
flock 9
flock --shared 8
start
exec 9>&-
if [ -z "${ENGINE_ONLY:-}" ]; then
    tools/base-image.sh 8>&-
    # Package installs inside image builds trust the CAs that this machine's package installs trust.
    for name in PIP_CERT SSL_CERT_FILE REQUESTS_CA_BUNDLE; do
        if [ -z "${TPU_LAUNCH_CA_BUNDLE:-}" ] && [ -s "${!name:-}" ]; then
            export TPU_LAUNCH_CA_BUNDLE=${!name}
            echo "image builds trust the CA bundle $TPU_LAUNCH_CA_BUNDLE (from $name; TPU_LAUNCH_CA_BUNDLE overrides)"
        fi
    done
fi
"$@" 8>&-
