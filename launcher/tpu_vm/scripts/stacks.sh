#!/bin/sh
# Prints the container's process list and the stack trace of each Python process ($dump runs in the container).
# shellcheck disable=SC2086 # $docker is one word or three
. ./engine.sh
: "${container:?}" "${dump:?}" "${native?}"
$docker top "$container" 2>&1
timeout 20 $docker exec --user 0 "$container" sh -c "$dump" "$native" 2>&1
