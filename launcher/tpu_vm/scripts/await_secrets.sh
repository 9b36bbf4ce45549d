#!/bin/sh
# Runs in the container, before the command (its arguments): waits for the secrets, $seconds at most, takes them into the
# environment, and removes them. They come when the last host has started. /run/tpu-launch is a tmpfs: no argument, file on a disk or `docker inspect` holds a secret.
: "${seconds:?}"
cd /run/tpu-launch || exit 1
i=0
while [ ! -e ready ]; do
  i=$((i + 1))
  if [ $i -gt $((seconds * 10)) ]; then
    echo "tpu-launch: the secrets of this run did not arrive within $seconds s (run.start_minutes and 2 more)" >&2
    exit 1
  fi
  sleep 0.1
done
# shellcheck source=/dev/null
. ./secrets
rm -f secrets
: >taken
cd "$OLDPWD" || exit 1
exec "$@"
