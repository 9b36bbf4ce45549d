#!/bin/sh
# Runs as root on the host: prints `<process id>:<name>` of every process that has a TPU device open for writing. Agents
# that read the chips' counters open the files read-only, and do not keep a run from opening them.
find /proc/[0-9]*/fd -maxdepth 1 \( -lname '/dev/accel[0-9]*' -o -lname '/dev/vfio/[0-9]*' \) 2>/dev/null |
  sed 's|/fd/|/fdinfo/|' |
  while read -r open; do
    ! grep -q '^flags:.*[12]$' "$open" 2>/dev/null || echo "$open"
  done | cut -d/ -f3 | sort -un |
  while read -r process; do echo "$process:$(tr ' ' '_' <"/proc/$process/comm")"; done | tr '\n' ' '
