#!/bin/sh
# Prints one line of JSON (the container's state, the host's boot at its creation and now, and the time of this boot),
# or `absent`, or `no engine: <reason>`; then, if $progress names a file, the newest line of progress of each of the
# container's processes, as `progress <JSON>` ($read_progress runs in the container); then its log with the engine's times.
# Waits at most $patience seconds for the container's end first, unless that is empty.
# Arguments: options of `docker logs`. Of `--tail N --since TIME`, only the first is used while this host's clock is
# before TIME: the clock stepped back, and new lines are stamped earlier.
# shellcheck disable=SC2086 # $docker is one word or three
. ./engine.sh
. ./boot.sh
# Unix seconds of the host's boot.
booted=$(($(sed -n 's/^btime //p' /proc/stat) + init_ticks / 100))
: "${container:?}" "${patience?}" "${log_bytes:?}" "${progress?}" "${read_progress?}"
cut='head'
[ -z "$patience" ] || timeout "$patience" $docker wait "$container" >/dev/null 2>&1
if [ "${1-} ${3-}" = '--tail --since' ] &&
  LC_ALL=C expr "at $(date -u +%Y-%m-%dT%H:%M:%S)" '<' "at $4" >/dev/null; then
  set -- --tail "$2"
  cut='tail' # the newest lines; else the next observation begins where this one ends
fi
created_on='{{json (index .Config.Labels "'$label_boot'")}}'
summary='{"state": {{json .State}}, "created_on": '$created_on', "boot": "'$boot'", "booted": '$booted'}'
# docker prints an empty line when there is no such container.
if answer=$($docker inspect --format "$summary" "$container" 2>/dev/null); then
  printf '%s\n' "$answer"
  [ -z "$progress" ] || timeout 10 $docker exec "$container" sh -c "$read_progress" "$progress" 2>/dev/null </dev/null
  $docker logs --timestamps "$@" "$container" 2>&1 | $cut -c "$log_bytes"
elif errors=$($docker version 2>&1 >/dev/null); then
  echo absent
else
  echo "no engine: $(words)"
fi
