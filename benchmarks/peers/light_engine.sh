#!/bin/sh
# In place of a container engine on a light host: a container is a folder, its command a plain process. Worker $WORKER.
root=/rack/$WORKER
while :; do case "$1" in --*=*) shift ;; --*) shift 2 ;; *) break ;; esac; done
verb=$1; shift
last() { for last in "$@"; do :; done; }
now() { date -u +%Y-%m-%dT%H:%M:%S.%NZ; }
alive() { [ -e "$c/pid" ] && [ ! -e "$c/exit" ]; }
status() { if [ -e "$c/exit" ]; then echo exited; elif [ -e "$c/pid" ]; then echo running; else echo created; fi; }
case $verb in
version|info) echo 1 ;;
ps|cp|pull) ;;
image) echo sha256:1 ;;
create)
  while [ $# -gt 0 ]; do
    case $1 in --name) c=$root/$2; shift 2 ;; *@sha256:*) shift; break ;; *) shift ;; esac
  done
  mkdir -p "$c"; for word in "$@"; do printf '%s\0' "$word"; done > "$c/command" ;;
start)
  last "$@"; c=$root/$last
  [ -e "$c/pid" ] && exit 0
  now > "$c/started"
  # shellcheck disable=SC2016 # the inner shells expand it
  setsid sh -c '
    echo $$ > "$1/pid"
    { xargs -0 sh -c '"'"'"$@" & echo $! > "$0/child"; wait $!; echo $? > "$0/code"'"'"' "$1" < "$1/command"; } 2>&1 |
      while IFS= read -r line; do echo "$(date -u +%Y-%m-%dT%H:%M:%S.%NZ) $line"; done >> "$1/log"
    date -u +%Y-%m-%dT%H:%M:%S.%NZ > "$1/finished"
    mv "$1/code" "$1/exit"' sh "$c" < /dev/null > /dev/null 2>&1 &
  while [ ! -e "$c/pid" ]; do sleep 0.01; done ;;
inspect)
  last "$@"; c=$root/$last; [ -d "$c" ] || exit 1
  case "$*" in
  *json*) echo >> "$root/looks"
    state='{"Status":"%s","ExitCode":%s,"OOMKilled":false,"Error":"","StartedAt":"%s","FinishedAt":"%s"}\n'
    # shellcheck disable=SC2059 # the format is the line above
    printf "$state" "$(status)" "$(cat "$c/exit" 2>/dev/null || echo 0)" \
      "$(cat "$c/started" 2>/dev/null)" "$(cat "$c/finished" 2>/dev/null)" ;;
  *Status*) status ;;
  *Running*) if alive; then echo true; else echo false; fi ;;
  *Image*) echo sha256:1 ;;
  *Name*) echo "/$last" ;;
  *) echo "[]" ;;
  esac ;;
logs)
  since=0
  while [ $# -gt 1 ]; do case $1 in --since) since=$2; shift 2 ;; *) shift ;; esac; done
  awk -v since="$since" '$1 >= since' "$root/$1/log" 2>/dev/null ;;
wait) last "$@"; c=$root/$last; tail --pid="$(cat "$c/pid")" -s 0.2 -f /dev/null; cat "$c/exit" ;;
stop|kill)
  last "$@"; c=$root/$last; alive || exit 0
  [ "$verb" = stop ] && kill -TERM "$(cat "$c/child")" 2>/dev/null
  i=0; while alive && [ "$verb" = stop ] && [ $i -lt 15 ]; do sleep 0.2; i=$((i+1)); done
  alive && kill -9 "$(cat "$c/child")"
  while alive; do sleep 0.05; done ;;
rm) last "$@"; rm -rf "${root:?}/$last" ;;
esac
exit 0
