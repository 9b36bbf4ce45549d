#!/bin/sh
# In place of a container engine on a light host: a container is a folder, its command a plain process. Worker $WORKER.
root=/rack/$WORKER
while :; do case "$1" in --*=*) shift ;; --*) shift 2 ;; *) break ;; esac; done
verb=$1; shift
last() { for last in "$@"; do :; done; }
# Puts $3 in the place of every $2 in $1; the result is in $text. Without a process: an engine is not what is measured.
put() {
  text="" rest=$1
  while [ "${rest#*"$2"}" != "$rest" ]; do text=$text${rest%%"$2"*}$3; rest=${rest#*"$2"}; done
  text=$text$rest
}
# The file of a container: the first line of it.
line() { line=""; [ ! -e "$c/$1" ] || IFS= read -r line < "$c/$1" || :; }
now() { date -u +%Y-%m-%dT%H:%M:%S.%NZ; }
alive() { [ -e "$c/pid" ] && [ ! -e "$c/exit" ]; }
status() { if [ -e "$c/exit" ]; then echo exited; elif [ -e "$c/pid" ]; then echo running; else echo created; fi; }
case $verb in
version|info) echo 1 ;;
ps|cp|pull) ;;
image) echo sha256:1 ;;
create)
  boot=""
  while [ $# -gt 0 ]; do
    case $1 in
    --name) c=$root/$2; shift 2 ;;
    --label) case $2 in tpu-launch.boot=*) boot=${2#*=} ;; esac; shift 2 ;;
    *@sha256:*) shift; break ;;
    *) shift ;;
    esac
  done
  mkdir "$c" "$c/tmpfs" || exit 1
  echo "$boot" > "$c/boot"
  # The words as the shell reads them.
  for word in "$@"; do
    put "$word" /run/tpu-launch "$c/tmpfs"; put "$text" "'" "'\\''"; printf " '%s'" "$text"
  done > "$c/command" ;;
exec)
  mark=""
  while :; do
    case $1 in --interactive) shift ;; --env) mark=$2; shift 2 ;; --user) shift 2 ;; *) break ;; esac
  done
  c=$root/$1; shift; alive || exit 1
  [ -z "$mark" ] || exec env "$mark" "$@"
  put "$3" /run/tpu-launch "$c/tmpfs"
  put "$text" '/proc/[0-9]*' "/proc/$(cat "$c/child")" # not the processes of other hosts
  script=$text
  shift 3
  [ $# = 0 ] || { put "$1" /dev/shm "$c/tmpfs"; shift; set -- "$text" "$@"; }
  exec sh -c "$script" "$@" ;;
start)
  last "$@"; c=$root/$last
  [ -e "$c/pid" ] && exit 0
  export c
  now > "$c/started"
  # shellcheck disable=SC2016 # the inner shell expands it
  setsid sh -c '
    { eval "set -- $(cat "$1/command")"; "$@" & echo $! > "$c/child"; wait $!; echo $? > "$c/code"; } 2>&1 |
      while IFS= read -r line; do echo "$(date -u +%Y-%m-%dT%H:%M:%S.%NZ) $line"; done >> "$1/log"
    date -u +%Y-%m-%dT%H:%M:%S.%NZ > "$1/finished"
    mv "$1/code" "$1/exit"' sh "$c" < /dev/null > /dev/null 2>&1 &
  echo $! > "$c/pid" ;;
inspect)
  last "$@"; c=$root/$last; [ -d "$c" ] || { echo; exit 1; }
  text=$2
  status=$(status) running=false
  [ "$status" != running ] || running=true
  case $text in *'{{json .State}}'*)
    echo >> "$root/looks"
    line exit; state='{"Status":"'$status'","ExitCode":'${line:-0}',"OOMKilled":false,"Error":""'
    line started; state=$state',"StartedAt":"'$line'"'
    line finished; put "$text" '{{json .State}}' "$state,\"FinishedAt\":\"$line\"}" ;;
  esac
  line boot
  put "$text" '{{json (index .Config.Labels "tpu-launch.boot")}}' "\"$line\""
  put "$text" '{{index .Config.Labels "tpu-launch.boot"}}' "$line"
  put "$text" '{{.State.Status}}' "$status"
  put "$text" '{{.State.Running}}' "$running"
  put "$text" '{{.Image}}' sha256:1
  case $text in *'{{'*) echo "no such field: $text" >&2; exit 1 ;; esac
  echo "$text" ;;
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
