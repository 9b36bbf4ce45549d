#!/bin/sh
# Passes standard input to the started container, once. $receive: the script that takes it there.
# Reports `delivered` or `failed <reason>`.
# shellcheck disable=SC2086 # $docker is one word or three
. ./report.sh
: "${container:?}" "${receive:?}"
$docker exec --interactive "$container" sh -c "$receive" ||
  { report failed "the secrets can not be passed on"; exit 1; }
report delivered
