#!/bin/sh
# Runs as root on the host: prints `<process id>:<name>` of every process that has a TPU device open.
find /proc/[0-9]*/fd -maxdepth 1 \( -lname '/dev/accel[0-9]*' -o -lname '/dev/vfio/[0-9]*' \) 2>/dev/null |
  cut -d/ -f3 | sort -un |
  while read -r process; do echo "$process:$(tr ' ' '_' <"/proc/$process/comm")"; done | tr '\n' ' '
