#!/bin/sh
# Included by scripts that tell one boot of the host from another. $boot: the kernel's boot id with the time at which
# PID 1 started, so that a host which is a container with an init of its own has one, too. $booted: when, in Unix
# seconds. A container carries the boot on which it was created as its label $label_boot.
# shellcheck disable=SC2034,SC2086 # the scripts that include this one use it; $docker is one word or three
: "${docker:?}" "${label_boot:?}"
init_ticks=$(sed 's/.*) //' /proc/1/stat 2>/dev/null | cut -d ' ' -f 20)
boot=$(cat /proc/sys/kernel/random/boot_id).${init_ticks:-0}
booted=$(($(sed -n 's/^btime //p' /proc/stat) + ${init_ticks:-0} / 100))
# Whether the host rebooted since the container $1 was created.
rebooted_since() {
  created_on=$($docker inspect --format "{{index .Config.Labels \"$label_boot\"}}" "$1" 2>/dev/null)
  [ -n "$created_on" ] && [ "$created_on" != "$boot" ]
}
