#!/bin/sh
# Passes standard input to the started container, once. $receive: the script that takes it there.
# Reports `delivered` or `failed <reason>`.
# shellcheck disable=SC2086 # $docker is one word or three
. ./report.sh
: "${container:?}" "${receive:?}"
errors=$($docker exec --interactive "$container" sh -c "$receive" 2>&1 >/dev/null) ||
  { report failed "the secrets can not be passed on: $(words)"; exit 1; }
report delivered
