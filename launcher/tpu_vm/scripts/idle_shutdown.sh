#!/bin/bash
# The startup script of a slice: host 0 deletes its own slice when no run has been on it for $idle_seconds.
: "${parent:?}" "${slice:?}" "${label_run:?}" "${idle_seconds:?}" "${interval:?}"
metadata() {
  curl -sf --max-time 10 -H 'Metadata-Flavor: Google' "http://metadata.google.internal/computeMetadata/v1/instance/$1"
}
[ "$(metadata attributes/agent-worker-number)" = 0 ] || exit 0

delete() {
  token=$(metadata service-accounts/default/token | sed -n 's/.*"access_token" *: *"\([^"]*\)".*/\1/p')
  # Pass the token on standard input: arguments are visible to every user of the host.
  printf 'header = "Authorization: Bearer %s"\n' "$token" |
    curl -s --max-time 60 --config - -X DELETE "${CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU:-https://tpu.googleapis.com/}v2/$1"
}

# Prints the seconds since the boot: the clock of the host may be set meanwhile.
uptime_seconds() { read -r uptime _ </proc/uptime && echo "${uptime%.*}"; }

watch() {
  last=$(uptime_seconds)
  while sleep "$interval"; do
    if [ -n "$(docker ps --quiet --filter "label=$label_run")" ] || ! docker version >/dev/null 2>&1; then
      last=$(uptime_seconds)
    fi
    if [ $(($(uptime_seconds) - last)) -ge "$idle_seconds" ]; then
      echo "$(date -u) no run for $idle_seconds s: deleting this slice"
      delete "$parent/queuedResources/$slice?force=true"
      delete "$parent/nodes/$slice"
      sleep 60
    fi
  done
}

watch >>/var/log/tpu-launch-abandoned.log 2>&1 </dev/null &
disown
exit 0
