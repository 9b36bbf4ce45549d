#!/bin/sh
# Prints `memory <the kernel's figures>`, and again at the end, because py-spy needs memory itself; for every Python
# process `process <id> [<state>] [<wait channel>] <command>`, `polling <number of its threads, native ones too, that
# wait in poll(), as for a connection>`, its stack traces by py-spy (in our images) or why there are none, and `source
# <file>:<line> <text>` for each frame. With $0 "native", frames of native code too, if ptrace is allowed: it pauses
# each process for about 0.3 s.
# shellcheck disable=SC2164,SC2046 # where the kernel has no such folder, the files are missing; one line for all words
cd /sys/fs/cgroup 2>/dev/null
tell_memory() {
  set -- memory.events memory.pressure memory.stat memory/memory.stat memory/memory.oom_control
  set -- /proc/meminfo /proc/pressure/memory "$@"
  echo memory $(sed -n '/^Mem[TA]/p; /^full/p; /^oom_kill /p; /^workingset_refault_/p' "$@" 2>/dev/null)
}
tell_memory
for process in /proc/[0-9]*; do
  state=$(sed -n 's/^State:[[:space:]]*//p' "$process/status" 2>/dev/null)
  case $state$(readlink "$process/exe") in
    Z*) echo "process ${process#/proc/} [$state] [] $(cat "$process/comm")" ;;
    *python*)
      name=$(tr '\0' ' ' <"$process/cmdline" | tr -d '\n' | head -c 300)
      echo "process ${process#/proc/} [$state] [$(cat "$process/wchan")] $name"
      echo "polling $(grep -l poll_schedule "$process"/task/*/wchan | wc -l)"
      dump="timeout 15 py-spy dump --full-filenames --pid ${process#/proc/}"
      stacks=$($dump --nonblocking 2>&1)
      printf '%s\n' "$stacks"
      printf '%s\n' "$stacks" | sed -n 's/^ .*(\(\/.*\):\([0-9][0-9]*\))$/\2 \1/p' | sort -u | head -n 300 |
        awk '{ file = substr($0, index($0, " ") + 1)
          for (n = 0; n < $1 && (getline text < file) > 0; n++) continue
          close(file)
          if (n == $1) printf "source %s:%s %s\n", file, n, substr(text, 1, 200) }'
      case $0$state in native[RS]*) $dump --native 2>&1 ;; esac
      ;;
  esac
done
tell_memory
