"""Programs that run inside the container: PID 1, and the shell behind the exec socket.

The shell reads requests from its standard input: a line of nonce, script size and stdin size, then
both of these as raw bytes. Each script runs in a process group of its own with its own standard
input, so it can neither read the next request nor kill the shell by accident. Afterwards everything
else in the container is killed, and the nonce with the exit code ends the output. The nonce is
made by the host for each request, and never given to the script.
"""

from __future__ import annotations

# Reaps orphans, ignores every signal that can be ignored and waits for ever on a pipe of its own.
INIT = r"""
trap '' TERM HUP INT QUIT PIPE ALRM USR1 USR2
exec 9<> <(:)
while :; do IFS= read -r -u 9 _; done
"""

SHELL = r"""
exec 2>/dev/null
set -m
folder=${TMPDIR:-/tmp}
input=$folder/.stdin-$$
spare=" 1 $$ $PPID "

kill_others() {
  local entry pid found round
  for ((round = 0; round < 200; round++)); do
    found=0
    for entry in /proc/[0-9]*; do
      pid=${entry#/proc/}
      [[ $spare == *" $pid "* ]] && continue
      kill -9 "$pid" && found=1
    done
    ((found)) || { dirty=0; return; }
  done
  dirty=1
}

count_oom_kills() {
  local key value file
  oom=0
  for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    [[ -r $file ]] || continue
    while read -r key value; do [[ $key == oom_kill ]] && oom=$value; done <"$file"
    return
  done
}

while IFS=' ' read -r nonce size stdin; do
  IFS= LC_ALL=C read -r -N "$size" script
  source=/dev/null
  if ((stdin)); then head -c "$stdin" >"$input"; source=$input; fi
  (unset nonce; exec <"$source" 2>&1; eval "$script")
  code=$?
  kill_others
  count_oom_kills
  ((stdin)) && rm -f "$input"
  printf '%s %d %d %d\n' "$nonce" "$code" "$oom" "$dirty"
done
"""

# $1: the file that carries folder, environment and functions on; $2: the first folder; $3: the
# command.
STATEFUL = r"""
__state=$1; __start=$2; __command=$3
if [[ -r $__state ]]; then unset $(compgen -e); . "$__state"; else cd -- "$__start"; fi 2>/dev/null
__save() {
  { printf 'cd -- %q\n' "$PWD"; umask -p; export -p; declare -f; } >"$__state" 2>/dev/null
}
trap '__save' EXIT
set --
eval "$__command"
"""


def unusable(script: str) -> str:
    """Return the reason why no process can be given ``script``; empty when one can."""
    if "\0" in script:
        return "it holds a NUL byte"
    try:
        script.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return "it holds half a surrogate pair, which is no text"
    return ""
