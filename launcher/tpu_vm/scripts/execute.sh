#!/bin/sh
# Runs a command (this script's arguments) in the running container and prints its output and errors. The last line is
# `$mark exit <code>` or `$mark failed <reason>`.
# Ends the command after $seconds and, with `held`, as soon as standard input ends, which it does with the connection.
# Without `held`, gcloud may repeat this script: that ends the command. $end runs in the container and ends the processes
# that carry the mark.
# shellcheck disable=SC2086 # $docker is one word or three
. ./engine.sh
: "${container:?}" "${mark:?}" "${held:?}" "${seconds:?}" "${end:?}"
exec 3<&0 </dev/null 2>&1
end_command() { $docker exec --user 0 "$container" sh -c "$end" sh "$mark" >/dev/null 2>&1; }
if [ "$held" = no ]; then
  . ./begin_once.sh
  if [ "$again" = yes ]; then
    end_command
    echo "$mark failed the connection broke after it had begun: what was left of it is ended, and it is not run again"
    exit 0
  elif [ -n "$unmarked" ]; then
    echo "$mark failed it is not run, because gcloud might repeat it and no mark can be left: $unmarked"
    exit 0
  fi
fi

status=$($docker inspect --format '{{.State.Status}}' "$container" 2>/dev/null)
if [ "$status" != running ]; then echo "$mark failed its container is ${status:-not there}"; exit 0; fi
begun=$(date +%s)
timeout "$seconds" $docker exec --env "TPU_LAUNCH_EXEC=$mark" "$container" "$@" 3<&- &
client=$!
watcher=
if [ "$held" = yes ]; then
  # Close its output, which would keep the connection open.
  (while read -r _ <&3; do :; done; end_command) >/dev/null 2>&1 &
  watcher=$!
fi
exec 3<&-
wait "$client"
code=$?
[ -z "$watcher" ] || kill "$watcher" 2>/dev/null
if [ $code = 124 ] && [ $(($(date +%s) - begun)) -ge "$seconds" ]; then
  end_command
  echo "$mark failed not done within $seconds s: it was ended"
  exit 0
fi
# A client that a signal ended (SIGPIPE, for example) leaves its command running.
[ $code -lt 128 ] || end_command
echo "$mark exit $code"
