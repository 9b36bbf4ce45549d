#!/bin/sh
# Reports `up` when the container engine answers, else `failed`.
# shellcheck disable=SC2086 # $docker is one word or three
. ./report.sh
if $docker version >/dev/null 2>&1; then
  report up
else
  report failed "its container engine does not answer yet"
fi
