#!/bin/sh
# Refuses a host with a running container of another run, or with one of a newer attempt (this script came late);
# removes containers of older attempts of this run; pulls the image and creates the container of this attempt.
# Arguments: the words of `docker create`. $files: one line a file, `<name> <content in base64>`.
# Reports `ready <image id>`, `busy <id of the other run>` or `failed <reason>`.
# shellcheck disable=SC2086 # $docker is one word or three
. ./report.sh
. ./boot.sh
: "${container:?}" "${image:?}" "${run_id:?}" "${attempt:?}" "${label_run:?}" "${label_attempt:?}" "${pull:?}" "${registry?}" "${files?}" "${huge_pages?}"

if [ -z "$worker" ]; then report failed "the metadata server does not tell the worker index"; exit 1; fi
fail() { report failed "$1: $(printf '%s ' "$errors" | tr '\n' ' ' | tail -c 600)"; exit 1; }

inspect_image() { image_id=$($docker image inspect --format '{{.Id}}' "$image" 2>/dev/null); }

pull_image() {
  if [ -z "$registry" ]; then
    errors=$($docker pull --quiet "$image" 2>&1 >/dev/null)
    return
  fi
  # $login holds the token of the host's service account until clean_up.
  login=$(mktemp -d)
  curl -sf --max-time 10 -H 'Metadata-Flavor: Google' "$metadata/service-accounts/default/token" |
    sed 's/.*"access_token" *: *"\([^"]*\)".*/\1/' |
    $docker --config "$login" login --username oauth2accesstoken --password-stdin "https://$registry" >/dev/null 2>&1
  errors=$($docker --config "$login" pull --quiet "$image" 2>&1 >/dev/null)
}

clean_up() { [ -z "$folder$login" ] || rm -rf ${folder:+"$folder"} ${login:+"$login"}; }
folder='' login='' image_id=''
trap clean_up EXIT
# stop.sh creates the file before it looks for the container; this script looks for the file after it has created the
# container. So one of the two removes it.
refuse_if_stopped() {
  [ -e "/tmp/$container.$worker.over" ] || return 0
  [ "${1-}" != created ] || $docker rm --force "$container" >/dev/null 2>&1 </dev/null
  report failed "this attempt was ended before the host was prepared for it"
  exit 1
}
refuse_if_stopped
there=no
listed="{{.Label \"$label_run\"}} {{.Names}} {{.State}} {{.Label \"$label_attempt\"}} {{.Label \"$label_boot\"}}"
runs=$($docker ps --all --filter "label=$label_run" --format "$listed")
while read -r run name state number created_on; do
  if [ "$run" != "$run_id" ]; then
    # Never touch the container of another run.
    [ "$state" != running ] || { report busy "$run"; exit 1; }
  elif [ "$number" -gt "$attempt" ]; then
    report failed "attempt $number of this run is on the host already"
    exit 1
  elif [ "$name" != "$container" ]; then
    $docker rm --force "$name" >/dev/null 2>&1 </dev/null
  elif [ "$state" = created ] && rebooted_since "$created_on"; then
    # Recreate a container that was created before a reboot and never started.
    $docker rm --force "$name" >/dev/null 2>&1 </dev/null
  else
    there=yes
  fi
done <<EOF
$runs
EOF

if [ "$there" = no ]; then
  [ "$pull" = no ] || inspect_image || pull_image || fail "the image can not be pulled"
  errors=$($docker create --env TPU_WORKER_ID="$worker" --label "$label_boot=$boot" "$@" 2>&1 >/dev/null) ||
    fail "the container can not be created"
  refuse_if_stopped created
fi

# Optional: check_host.sh reports where it can't be done.
[ -z "$huge_pages" ] || grep -qF '[always]' "$huge_pages" 2>/dev/null ||
  sudo -n sh -c 'echo always >"$0"' "$huge_pages" >/dev/null 2>&1 </dev/null

if [ -n "$files" ]; then
  folder=$(mktemp -d) && umask 022 && mkdir "$folder/tpu-launch"
  while read -r name content; do
    echo "$content" | base64 -d >"$folder/tpu-launch/$name"
  done <<EOF
$files
EOF
  errors=$($docker cp "$folder/tpu-launch" "$container:/etc/" 2>&1 >/dev/null) ||
    fail "the configuration can not be copied into the container"
fi
# Hosts are compared by the image id, whether they had the image or pulled it.
[ "$pull" = no ] || [ -n "$image_id" ] || inspect_image
[ -n "$image_id" ] || look_at "$container"
report ready "$image_id"
