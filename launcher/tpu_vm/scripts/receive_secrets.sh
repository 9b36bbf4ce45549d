#!/bin/sh
# Runs in the container: keeps standard input for await_secrets.sh, unless secrets were taken before.
cd /run/tpu-launch && if [ -e taken ]; then
  cat >/dev/null
else
  umask 077 && cat >secrets && : >ready
fi
