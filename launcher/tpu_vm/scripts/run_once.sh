#!/bin/sh
# Runs $command, a shell command, on the host, once: a repetition of this script only says so. Returns its exit code, but
# 254 for 255, after which gcloud would repeat it, and if it is not run.
. ./begin_once.sh
: "${command:?}"
if [ "$again" = yes ]; then
  echo 'tpu-launch: the connection broke after the command had begun: it is not run again, and may still run' >&2
elif [ -n "$unmarked" ]; then
  echo "tpu-launch: the command is not run, because gcloud might repeat it and no mark can be left: $unmarked" >&2
else
  eval "$command"
  code=$?
  [ $code -gt 254 ] || exit $code
fi
exit 254
