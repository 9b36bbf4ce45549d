#!/bin/sh
# Prints facts that a start depends on, a line each: `tpu-launch-fact <key> <value>`. Changes nothing.
# $list_holders: the script that lists the processes holding the TPU, as root.
# shellcheck disable=SC2046,SC2086 # unquoted: a value of several lines becomes one, without a process
. ./engine.sh
: "${image:?}" "${run_id:?}" "${label_run:?}" "${list_holders:?}" "${huge_pages?}"
set -f
fact() { echo tpu-launch-fact $1 $2; }
metadata=http://metadata.google.internal/computeMetadata/v1/instance
fact worker "$(curl -sf --max-time 10 -H 'Metadata-Flavor: Google' "$metadata/attributes/agent-worker-number")"
fact time "$(date +%s)"
image_id=$($docker image inspect --format '{{.Id}}' "$image" 2>/dev/null)
fact image "$image_id"
if [ -n "$image_id" ]; then
  fact engine up
else
  # Without the image, the engine may be down and the disk needs room.
  engine=$($docker info --format '{{.ServerVersion}} {{.DockerRootDir}}' 2>/dev/null)
  root=${engine#* }
  fact engine "${engine%% *}"
  fact free_kb "$(
    set -- $(df -Pk "${root:-/}" 2>/dev/null)
    [ $# -lt 6 ] || shift $(($# - 6))
    echo "${4:-}"
  )"
fi
others=''
for run in $($docker ps --filter "label=$label_run" --format "{{.Label \"$label_run\"}}" 2>/dev/null); do
  [ "$run" = "$run_id" ] || others="$others $run"
done
fact runs "$others"
fact holders "$(sudo -n sh -c "$list_holders" 2>/dev/null)"
# Report transparent huge pages that are off and that prepare.sh can't switch on.
[ -z "$huge_pages" ] || grep -qF '[always]' "$huge_pages" 2>/dev/null ||
  sudo -n test -w "$huge_pages" 2>/dev/null ||
  fact huge_pages_kept "$(cat "$huge_pages" 2>/dev/null)"
fact "done" yes
