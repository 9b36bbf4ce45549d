#!/bin/sh
# Runs in the container before the command (its arguments): waits for the secrets, $seconds at most, exports them, and
# removes them. They come when the last host has started. /run/tpu-launch is a tmpfs: no argument, no file on a disk and
# no `docker inspect` holds a secret.
: "${seconds:?}"
cd /run/tpu-launch || exit 1
# Open the pipe before looking for the file; receive_secrets.sh creates the file before it looks for the pipe. So no
# arrival is missed, and a waiting host runs nothing.
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
