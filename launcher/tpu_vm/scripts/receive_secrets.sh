#!/bin/sh
# Runs in the container: keeps standard input for await_secrets.sh, unless secrets were taken before, and wakes it up. A
# connection that breaks half-way leaves nothing: only what ends with the last line counts, and it appears as a whole. Of
# two at once, the later one finds them taken.
cd /run/tpu-launch && if [ -e taken ]; then
  cat >/dev/null
else
  umask 077
  last=''
  # By the shell itself: a start runs this on each host of a slice.
  while IFS= read -r line; do
    last=$line
    printf '%s\n' "$line" || { last=''; break; }
  done >received.$$
  [ "$last" = '# end' ] && mv received.$$ secrets && : >ready &&
    if [ -e taken ]; then rm -f secrets; elif [ -p gate ]; then echo go 1<>gate; fi
fi
