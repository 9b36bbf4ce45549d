#!/bin/sh
# Unpacks standard input (a gzipped tar archive in base64) over a folder of the container, whose command waits.
# Reports `copied`, or `failed <reason>`, as when the archive has another SHA-256 than $digest.
# shellcheck disable=SC2086 # $docker is one word or three
. ./report.sh
: "${container:?}" "${target:?}" "${digest:?}"
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
base64 -d >"$folder/overlay"
hash=$(sha256sum "$folder/overlay" | cut -d' ' -f1)
[ "$hash" = "$digest" ] || { report failed "another overlay ($hash) arrived than was sent ($digest)"; exit 1; }
errors=$(gzip -dc "$folder/overlay" | $docker cp - "$container:$target" 2>&1 >/dev/null) ||
  { report failed "the overlay can not be copied over $target: $errors"; exit 1; }
report copied
