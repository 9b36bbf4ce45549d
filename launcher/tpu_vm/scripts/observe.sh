#!/bin/sh
# Prints the container's state as one line of JSON (`absent`, or `no engine`), then its log with the engine's times.
# With $patience (seconds), waits that long at most for the container's end first.
# Arguments: options of `docker logs`.
# shellcheck disable=SC2086 # $docker is one word or three
. ./engine.sh
: "${container:?}" "${patience?}" "${log_bytes:?}"
[ -z "$patience" ] || timeout "$patience" $docker wait "$container" >/dev/null 2>&1
if $docker inspect --format '{{json .State}}' "$container" 2>/dev/null; then
  $docker logs --timestamps "$@" "$container" 2>&1 | head -c "$log_bytes"
elif $docker version >/dev/null 2>&1; then
  echo absent
else
  echo no engine
fi
