#!/bin/sh
# Runs in the container, before the command (its arguments): waits for the secrets, $seconds at most, takes them into the
# environment, and removes them. They come when the last host has started. /run/tpu-launch is a tmpfs: no argument, file on a disk or `docker inspect` holds a secret.
: "${seconds:?}"
cd /run/tpu-launch || exit 1
# The pipe is open before the file is looked for, and receive_secrets.sh makes the file before it looks for the pipe: what
# arrives in between is not missed, and nothing runs while a host waits for the slowest one.
mkfifo gate 2>/dev/null
exec 3<>gate
[ -e ready ] || timeout "$seconds" head -c 1 <&3 >/dev/null
exec 3>&-
if [ ! -e ready ]; then
  echo "tpu-launch: the secrets of this run did not arrive within $seconds s (run.start_minutes and 2 more)" >&2
  exit 1
fi
# shellcheck source=/dev/null
. ./secrets
: >taken
rm -f secrets gate
cd "$OLDPWD" || exit 1
exec "$@"
