#!/bin/sh
# Prints diagnostics of a failed container. Always succeeds.
# shellcheck disable=SC2086 # $docker is one word or three
. ./engine.sh
: "${container:?}"
exec 2>&1
echo '=== container'
$docker inspect "$container"
echo '=== containers'
$docker ps --all
echo '=== disks'
df -h
echo '=== memory'
cat /proc/meminfo /proc/loadavg
echo '=== kernel'
sudo -n dmesg | tail -n 200
echo '=== TPU logs of the container'
$docker cp "$container:/tmp/tpu_logs" - | tar -xO | tail -c 1000000
echo '=== TPU logs of the host'
for log in /tmp/tpu_logs/*; do
  echo "== $log"
  tail -c 200000 "$log"
done
exit 0
