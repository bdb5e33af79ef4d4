# A link of a chain: run, signal the step to save before the time is up, and submit the next link if there is work left.
set -uo pipefail
link=${VITRUVIAN_LINK:-1} failed=${VITRUVIAN_FAILED:-0} after_this=--dependency=afterany:$SLURM_JOB_ID
say() { echo "$(date +%FT%T) job $SLURM_JOB_ID, link $link: $1"; }
newest() { cat "$SAVE/latest" 2>/dev/null; } # checkpoint of a training; nothing for a job without any

submit() { # LABEL, sbatch options: a job that inherits none of this job's variables, because some contradict its own
  local label=$1 next
  shift
  next=$(
    conf=${SLURM_CONF-}
    unset "${!SLURM_@}" MASTER_ADDR MASTER_PORT VITRUVIAN_LINK VITRUVIAN_FAILED
    if [ -n "$conf" ]; then export SLURM_CONF=$conf; fi
    exec sbatch --parsable --kill-on-invalid-dep=yes "$after_this" "$@"
  ) || { say "$label was not accepted"; return 1; }
  say "$label is job ${next%%;*}"
  echo "${next%%;*} $label, after $SLURM_JOB_ID" >>"$JOB_LOG"
}

submit_next() { # the script as it runs, even if the file has changed; its options are given again, or SBATCH_ variables override them
  local pause script options
  for pause in 0 10 60 300; do
    sleep "$pause" &
    wait $! # a signal interrupts it
    # Slurm may have accepted the job although sbatch failed, or this job was requeued after submitting it.
    if squeue --noheader --me --name="$SLURM_JOB_NAME" --format=%E | grep -qw "afterany:$SLURM_JOB_ID"; then return; fi
    script=$(scontrol write batch_script "$SLURM_JOB_ID" -) || continue
    mapfile -t options < <(sed -En '/^#SBATCH\s+/{s///;/["'\'']/!s/\s#.*//;p}' <<<"$script" | xargs printf '%s\n')
    submit "link $((link + 1))" "${options[@]}" "$after_this" ${PAUSE:+--begin="now+$PAUSE"} \
      --export="ALL,VITRUVIAN_LINK=$((link + 1)),VITRUVIAN_FAILED=$failed" <<<"$script" && return
  done
  return 1
}

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) # in the image there is no scontrol
# Two jobs on a node have different ports, below Linux's ephemeral ports.
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
say "$SLURM_JOB_NUM_NODES nodes from $MASTER_ADDR, restart ${SLURM_RESTART_COUNT:-0}"
before=$(newest)
# Since Slurm 22.05 srun does not inherit --cpus-per-task from the job. It does inherit --export=NONE.
cores=(${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"})
srun --export=ALL --kill-on-bad-exit=1 "${cores[@]}" "${SRUN[@]}" "$RUN" "${COMMAND[@]}" &
step=$! told=0 late=''
# shellcheck disable=SC2317,SC2329  # the trap calls it
tell() {
  told=$((told + 1))
  say "told to save, $SIGNAL to the step"
  scancel --signal="$SIGNAL" "$SLURM_JOB_ID.0"
}
trap tell USR1
# SIGTERM at the time limit, after which Slurm waits KillWait seconds (30); or from scancel, which ends the chain.
# shellcheck disable=SC2154  # the trap is quoted
trap 'scontrol show job "$SLURM_JOB_ID" | grep -q Reason=TimeLimit || exit 143; late=1' TERM
waited=none
until [ "$waited" = "$told" ]; do # a signal ends `wait` too
  waited=$told
  wait "$step"
  code=$?
done
if [ -n "$late" ]; then
  say "the time was up before all was saved"
  for _ in {1..10}; do
    kill -0 "$step" 2>/dev/null || break
    sleep 1
  done
  code=75
fi
after=$(newest)
if [ "$after" != "$before" ] || { [ "$code" = 75 ] && [ -z "$SAVE" ]; }; then failed=0; else failed=$((failed + 1)); fi
status=1
case $code in
  0) say "done"; status=0 ;;
  [2-8]) say "refused with exit code $code; the chain ends"; status=$code ;;
  *)
    # Not exit code 75: some sites requeue such jobs automatically.
    if [ "$failed" -gt "$RETRIES" ]; then say "exit code $code, and nothing new $failed times; the chain ends"
    elif [ "$link" -ge "$LINKS" ]; then say "exit code $code; that was the last of $LINKS links"
    elif submit_next && { [ "$code" = 75 ] || [ "$told" != 0 ]; }; then status=0; fi ;;
esac
# After the next link: test partitions allow a user two jobs.
if [ -n "$BENCH" ] && [ "$after" != "$before" ]; then VITRUVIAN_LINKS='' VITRUVIAN_BENCH='' submit evaluation "$BENCH" "$SAVE/$after"; fi
exit "$status"
