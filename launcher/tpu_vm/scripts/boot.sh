#!/bin/sh
# Included by scripts that distinguish boots of the host. Sets $boot: the kernel's boot id and the start time of PID 1,
# so that a host that is a container with its own init has one, too. A container carries the boot of its creation as its
# label $label_boot.
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
