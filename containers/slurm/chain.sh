# A link of a chain: run, be told to save before the time is up, and submit the next link while there is something left.
set -uo pipefail
link=${VITRUVIAN_LINK:-1} failed=${VITRUVIAN_FAILED:-0}
say() { echo "$(date +%FT%T) job $SLURM_JOB_ID, link $link: $1"; }
newest() { cat "$SAVE/latest" 2>/dev/null; } # checkpoint of a training; nothing for a job without any

submit() { # LABEL, sbatch options: a job that inherits none of this one's SLURM_ variables, of which some contradict its own
  local label=$1 next
  shift
  next=$(
    conf=${SLURM_CONF-} after=afterany:$SLURM_JOB_ID
    unset "${!SLURM_@}"
    if [ -n "$conf" ]; then export SLURM_CONF=$conf; fi
    exec sbatch --parsable --kill-on-invalid-dep=yes --dependency="$after" "$@"
  ) || { say "$label was not accepted"; return 1; }
  say "$label is job ${next%%;*}"
  echo "${next%%;*} $label, after $SLURM_JOB_ID" >>"$JOB_LOG"
}

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) # in the image there is no scontrol
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))         # two jobs on a node have two ports
say "$SLURM_JOB_NUM_NODES nodes from $MASTER_ADDR, restart ${SLURM_RESTART_COUNT:-0}"
before=$(newest)
# Cores are said again: since Slurm 22.05 srun does not take them from the job.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" "${SRUN[@]}" "$RUN" "${COMMAND[@]}" &
step=$! told=0
# shellcheck disable=SC2317,SC2329  # the trap calls it
tell() {
  told=$((told + 1))
  say "told to save, $SIGNAL to the step"
  scancel --signal="$SIGNAL" "$SLURM_JOB_ID.0"
}
trap tell USR1
waited=none
until [ "$waited" = "$told" ]; do # a signal ends `wait` too
  waited=$told
  wait "$step"
  code=$?
done
after=$(newest)
if [ -n "$BENCH" ] && [ "$after" != "$before" ]; then submit evaluation "$BENCH" "$SAVE/$after"; fi

case $code in
  0) say "done"; exit 0 ;;
  [2-8]) say "refused with exit code $code; the chain ends"; exit "$code" ;;
esac
if [ "$after" != "$before" ] || { [ "$code" = 75 ] && [ -z "$SAVE" ]; }; then failed=0; else failed=$((failed + 1)); fi
if [ "$failed" -gt "$RETRIES" ]; then say "exit code $code, and nothing new $failed times; the chain ends"; exit 1; fi
if [ "$link" -ge "$LINKS" ]; then say "exit code $code; that was the last of $LINKS links"; exit 1; fi
# The script as it runs, whatever has become of the file. No exit code 75: some sites requeue such jobs by themselves.
scontrol write batch_script "$SLURM_JOB_ID" - |
  submit "link $((link + 1))" --export="ALL,VITRUVIAN_LINK=$((link + 1)),VITRUVIAN_FAILED=$failed" || exit 1
if [ "$code" = 75 ] || [ "$told" != 0 ]; then exit 0; fi
exit 1
