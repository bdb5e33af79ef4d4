# A task of a step: COMMAND… as a child of this shell, in the image if there is one. Slurm gives the signals of a step to
# this shell only (proctrack/cgroup) or to all processes (proctrack/linuxproc), so a command may get one twice.
# shellcheck shell=sh disable=SC2013,SC2317,SC2329  # process ids are words; the trap calls `tell`
# A signal before the command has its handler must not kill it, nor torchrun, which has none (pytorch 154849).
trap '' USR1
# A shell gives background processes no stdin.
exec 3<&0
"$@" <&3 3<&- &
child=$!
# SIGUSR1 is bit 9 of SigCgt: signal the process if it catches it, else those of its descendants that do.
tell() {
  if grep -qs '^SigCgt:.*[2367abef]..$' "/proc/$1/status"; then
    kill -s USR1 "$1"
  else
    for one in $(grep -ls "^PPid:.$1\$" /proc/[0-9]*/status); do
      one=${one#/proc/}
      tell "${one%/status}"
    done
  fi
}
trap 'tell $child' USR1
trap 'kill $child' TERM
# A signal interrupts `wait` too.
until
  wait $child
  code=$?
  ! kill -0 $child 2>/dev/null
do :; done
# A task that ends in order (refused, or saved) waits for the others to do so, or srun kills them and returns 143.
trap : TERM
case $code in [2-8] | 75) [ "${SLURM_NTASKS:-1}" = 1 ] || sleep 10 ;; esac
exit $code
