#!/bin/sh
# Starts the prepared container; leaves one alone that runs or has run. Of two runs prepared on the host at once, one
# starts.
# Reports `started`, `busy <id of the other run>`, or `failed <reason>`.
# shellcheck disable=SC2086 # $docker is one word or three
. ./report.sh
. ./boot.sh
: "${container:?}" "${run_id:?}" "${label_run:?}"

look_at "$container"
if [ -z "$status" ]; then report failed "there is no container $container"; exit 1; fi
if [ "$status" = created ]; then
  if rebooted_since "$created_on"; then report failed "the host rebooted after it had been prepared"; exit 1; fi
  # Start one container at a time. Every user must be able to open the lock file.
  lock=/tmp/tpu-launch.start
  [ -e "$lock" ] || (umask 022; : >"$lock") 2>/dev/null
  if [ -r "$lock" ]; then exec 9<"$lock"; flock -w 60 9; fi
  for run in $($docker ps --filter "label=$label_run" --format "{{.Label \"$label_run\"}}"); do
    [ "$run" = "$run_id" ] || { report busy "$run"; exit 1; }
  done
  if ! error=$($docker start "$container" 2>&1 >/dev/null 9<&-); then
    report failed "the container can not be started: $(echo $error | tail -c 600)"
    exit 1
  fi
fi
report started
