#!/bin/sh
# Included by scripts that inspect a container or distinguish boots of the host. Sets $boot: the kernel's boot id and
# the start time of PID 1, so that a host that is a container with its own init has one, too. A container carries the
# boot of its creation as its label $label_boot.
# Uses shell built-ins only: a start runs this on every host.
# shellcheck disable=SC2034,SC2046,SC2086 # the scripts that include this one use it; words are meant to be split
: "${docker:?}" "${label_boot:?}"
init=''
{ IFS= read -r init </proc/1/stat; } 2>/dev/null
# Ticks from the kernel's start to PID 1's: the 20th field after the name, which may hold blanks.
ticks_of_init() {
  set -- ${init##*) }
  init_ticks=${20:-0}
}
ticks_of_init
IFS= read -r boot </proc/sys/kernel/random/boot_id
boot=$boot.$init_ticks
# Inspects the container $1 once. Sets $status (empty when there is none), $image_id, and $created_on, the boot of its
# creation.
look_at() {
  set -- "$1" "{{.State.Status}} {{.Image}} {{index .Config.Labels \"$label_boot\"}}"
  set -- $($docker inspect --format "$2" "$1" 2>/dev/null)
  status=${1:-} image_id=${2:-} created_on=${3:-}
}
# Succeeds when the host rebooted since the boot $1.
rebooted_since() { [ -n "$1" ] && [ "$1" != "$boot" ]; }
