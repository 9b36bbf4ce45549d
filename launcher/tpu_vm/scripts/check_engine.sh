#!/bin/sh
# Reports `up` when the container engine answers, `forbidden <reason>` when this user may not use it, which will not
# pass, else `failed <reason>`.
# shellcheck disable=SC2086 # $docker is one word or three
. ./report.sh
if errors=$($docker version 2>&1 >/dev/null); then
  report up
# The client alone needs no engine: only sudo refuses it. Where there is no socket yet, it may turn out to be writable.
elif [ -e /var/run/docker.sock ] && ! $docker --version >/dev/null 2>&1; then
  report forbidden "$(words)"
else
  report failed "its container engine does not answer yet: $(words)"
fi
