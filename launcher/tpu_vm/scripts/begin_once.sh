#!/bin/sh
# Included by scripts whose command must not run twice: gcloud repeats a script whose connection breaks. Sets $again to
# `yes` if a script of this $mark has begun on the host before, and $unmarked to the reason if that can't be noted.
# Uses a tmpfs where there is one, so that a full disk keeps no command from running.
# shellcheck disable=SC2034 # the scripts that include this one use them
: "${mark:?}"
marks=/run/lock
[ -w "$marks" ] || marks=/tmp
# No command runs for longer than a week.
find "$marks" -maxdepth 1 -name 'tpu-launch-exec-*' -mtime +7 -exec rmdir {} + 2>/dev/null
again=no
if unmarked=$(mkdir "$marks/$mark" 2>&1); then :; elif [ -d "$marks/$mark" ]; then again=yes unmarked=''; fi
