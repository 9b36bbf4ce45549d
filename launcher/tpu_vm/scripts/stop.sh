#!/bin/sh
# Stops the container: SIGTERM, then SIGKILL after $grace seconds; removes it when $remove is `yes`. A container that
# has ended or is missing counts as stopped; one that never started is removed, and start.sh creates none of this name
# any more, also after a reboot, so that a late start does nothing. Reports `stopped` or `failed <reason>`.
# shellcheck disable=SC2086 # $docker is one word or three
. ./report.sh
: "${container:?}" "${grace:?}" "${remove:?}"
mark=/tmp/$container.$worker.stopping
true 2>/dev/null >"/var/tmp/$container.$worker.over"
status=$($docker inspect --format '{{.State.Status}}' "$container" 2>/dev/null)
if [ "$status" = created ] && $docker rm --force "$container" >/dev/null 2>&1; then status=''; fi
if [ -n "$status" ]; then
  # A second SIGTERM may make a program leave without saving: a replay, or a second stop, only waits. Without a mark (a
  # full disk), better two signals than none.
  if mkdir "$mark" 2>/dev/null || [ ! -d "$mark" ]; then
    errors=$($docker stop --time "$grace" "$container" 2>&1 >/dev/null)
  else
    timeout "$grace" $docker wait "$container" >/dev/null 2>&1 || errors=$($docker kill "$container" 2>&1 >/dev/null)
  fi
  if [ "$($docker inspect --format '{{.State.Running}}' "$container" 2>/dev/null)" = true ]; then
    report failed "the container can not be stopped: $(words)"
    exit 1
  fi
  [ "$remove" = no ] || $docker rm --force "$container" >/dev/null 2>&1
elif ! errors=$($docker version 2>&1 >/dev/null); then
  report failed "its container engine does not answer: $(words)"
  exit 1
fi
[ "$remove" = no ] || rmdir "$mark" 2>/dev/null
report stopped
