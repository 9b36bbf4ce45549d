#!/bin/sh
# Pulls the image, removes containers of older attempts of this run, creates the container of this attempt and starts
# it; leaves it alone if it runs or has run. Safe to run late, again, and twice at once. Refuses a host that has other
# addresses than $hosts says, that another run or process uses, that has a newer attempt, or where this one was ended.
# Arguments: the words of `docker create`. $hosts: words `<worker>=<address>`. $files: one line a file, `<name> <content
# in base64>`. $list_holders: the script that lists the processes holding the TPU, as root.
# Reports `started <image id> <Unix seconds> <setting of huge pages, if it hinders>`, `moved`, `busy <id of the other
# run>` or `failed <reason>`.
# shellcheck disable=SC2086 # $docker is one word or three
. ./report.sh
. ./boot.sh
: "${container:?}" "${image:?}" "${run_id:?}" "${attempt:?}" "${label_run:?}" "${label_attempt:?}" "${pull:?}" "${registry?}" "${files?}" "${huge_pages?}" "${hosts:?}" "${list_holders:?}"

refuse() { report "$@"; exit 1; }
fail() { refuse failed "$1: $(words)"; }
folder='' login='' pages=''
clean_up() { [ -z "$folder$login" ] || rm -rf ${folder:+"$folder"} ${login:+"$login"}; }
trap clean_up EXIT

# Sets $there to `yes` if the container runs or has run, else $stale to the containers to remove.
survey() {
  [ ! -e "/var/tmp/$container.$worker.over" ] || refuse failed "this attempt was ended before it started on the host"
  listed="{{.Label \"$label_run\"}} {{.Names}} {{.State}} {{.Label \"$label_attempt\"}}"
  runs=$($docker ps --all --filter "label=$label_run" --format "$listed" 2>/dev/null) ||
    { errors=$($docker ps 2>&1 >/dev/null); fail "its container engine does not answer"; }
  there=no stale=''
  while read -r run name state number; do
    if [ "$run" != "$run_id" ]; then
      # Never touch the container of another run.
      [ "$state" != running ] || refuse busy "$run"
    elif [ "$number" -gt "$attempt" ]; then
      refuse failed "attempt $number of this run is on the host already"
    elif [ "$name" = "$container" ] && [ "$state" != created ]; then
      there=yes
    else
      stale="$stale $name"
    fi
  done <<END
$runs
END
}

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

[ -n "$worker" ] || refuse failed "the metadata server does not tell the worker index"
addresses=$(hostname -I 2>/dev/null)
moved=$addresses
for address in $addresses; do
  case " $hosts " in *" $worker=$address "*) moved='' ;; esac
done
[ -z "$moved" ] || refuse moved "to $addresses"

if [ "$pull" = yes ] && ! $docker image inspect "$image" >/dev/null 2>&1; then
  survey
  [ "$there" = yes ] || pull_image ||
    fail "the image can not be pulled ($(df -Ph / | awk 'END {print $4}') free on its disk)"
fi

# One at a time, of any run: so of two runs one starts, and no copy of this script interferes with another. Every user
# must be able to open the lock file.
lock=/tmp/tpu-launch.start
[ -e "$lock" ] || (umask 022; : >"$lock") 2>/dev/null
if [ -r "$lock" ]; then
  exec 9<"$lock"
  flock -w 60 9 || refuse failed "another start on this host has not ended within 60 s"
fi
survey
if [ "$there" = no ]; then
  [ -z "$stale" ] || $docker rm --force $stale >/dev/null 2>&1
  holders=$(sudo -n sh -c "$list_holders" 2>/dev/null </dev/null)
  [ -z "$holders" ] ||
    refuse failed "its TPU is held by ${holders}(process id:name): end that there, for example: sudo kill PROCESS"
  # Optional: huge pages only make starts faster.
  [ -z "$huge_pages" ] || grep -qF '[always]' "$huge_pages" 2>/dev/null ||
    sudo -n sh -c 'echo always >"$0"' "$huge_pages" >/dev/null 2>&1 </dev/null || pages=$(cat "$huge_pages" 2>/dev/null)
  errors=$($docker create --env TPU_WORKER_ID="$worker" --label "$label_boot=$boot" "$@" 2>&1 >/dev/null) || {
    [ "$pull" = yes ] || $docker image inspect "$image" >/dev/null 2>&1 || # docker's own words advise a login
      errors="its engine has no image $image: set image.repository, from which hosts pull it"
    fail "the container can not be created"
  }
  if [ -n "$files" ]; then
    folder=$(mktemp -d) && umask 022 && mkdir "$folder/tpu-launch"
    while read -r name content; do
      echo "$content" | base64 -d >"$folder/tpu-launch/$name"
    done <<END
$files
END
    errors=$($docker cp "$folder/tpu-launch" "$container:/etc/" 2>&1 >/dev/null) ||
      fail "the configuration can not be copied into the container"
  fi
  # stop.sh creates its mark before it looks for the container; this script looks for the mark after it has created the
  # container. So one of the two removes it.
  if [ -e "/var/tmp/$container.$worker.over" ]; then
    $docker rm --force "$container" >/dev/null 2>&1
    refuse failed "this attempt was ended before it started on the host"
  fi
  errors=$($docker start "$container" 2>&1 >/dev/null 9<&-) || fail "the container can not be started"
fi
image_id=$($docker inspect --format '{{.Image}}' "$container" 2>/dev/null)
[ -n "$image_id" ] || refuse failed "the container was removed as soon as it had started"
report started "$image_id" "$(date +%s)" "$pages"
