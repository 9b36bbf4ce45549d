#!/bin/sh
# Included by scripts that look at a container, or tell one boot of the host from another. $boot: the kernel's boot id
# with the time at which PID 1 started, so that a host which is a container with an init of its own has one, too. A
# container carries the boot on which it was created as its label $label_boot.
# Every word here is the shell's own: a start runs this on each host of a slice.
# shellcheck disable=SC2034,SC2046,SC2086 # the scripts that include this one use it; words are meant to be split
: "${docker:?}" "${label_boot:?}"
init=''
{ IFS= read -r init </proc/1/stat; } 2>/dev/null
# The ticks from the kernel's start to that of PID 1: the 20th field after its name, which may hold blanks.
ticks_of_init() {
  set -- ${init##*) }
  init_ticks=${20:-0}
}
ticks_of_init
IFS= read -r boot </proc/sys/kernel/random/boot_id
boot=$boot.$init_ticks
# Looks at the container $1 once: its $status (empty when there is none), the id of its $image_id, and the boot that it
# was $created_on (empty when it does not say).
look_at() {
  set -- "$1" "{{.State.Status}} {{.Image}} {{index .Config.Labels \"$label_boot\"}}"
  set -- $($docker inspect --format "$2" "$1" 2>/dev/null)
  status=${1:-} image_id=${2:-} created_on=${3:-}
}
# Whether the host rebooted since a container was created on the boot $1.
rebooted_since() { [ -n "$1" ] && [ "$1" != "$boot" ]; }
