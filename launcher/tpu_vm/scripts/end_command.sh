#!/bin/sh
# Runs in the container: ends every process whose environment carries a command's mark ($1). SIGTERM, then SIGKILL after
# 3 s.
for signal in TERM KILL; do
  i=0
  while [ $i -lt 15 ]; do
    left=$(grep -ls "TPU_LAUNCH_EXEC=$1" /proc/[0-9]*/environ | tr -cs 0-9 ' ')
    [ -n "$left" ] || exit 0
    # shellcheck disable=SC2086 # several process ids
    [ $i -gt 0 ] || kill -s $signal $left 2>/dev/null
    i=$((i + 1))
    sleep 0.2
  done
done
