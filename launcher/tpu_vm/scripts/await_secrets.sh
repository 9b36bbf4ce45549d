#!/bin/sh
# Runs in the container, before the command (its arguments): waits for the secrets, takes them into the environment,
# and removes them. /run/tpu-launch is a tmpfs: no argument, file on a disk or `docker inspect` holds a secret.
cd /run/tpu-launch || exit 1
i=0
while [ ! -e ready ]; do
  i=$((i + 1))
  if [ $i -gt 1200 ]; then echo "tpu-launch: the secrets of this run did not arrive within 120 s" >&2; exit 1; fi
  sleep 0.1
done
# shellcheck source=/dev/null
. ./secrets
rm -f secrets
: >taken
cd "$OLDPWD" || exit 1
exec "$@"
