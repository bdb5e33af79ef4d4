# Before a training: each node alone (device, attention, its own GPUs), then all good nodes together (the link).
# If those fail together, each with its neighbour. The nodes to exclude, also slow ones, are printed, ready for --exclude.
set -uo pipefail
mkdir -p "$LOGS"
port=$((20000 + SLURM_JOB_ID % 12000))
cores=(${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}) # as in chain.sh
export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET

check() { # LABEL NUMBER NODE…: `train doctor` on these nodes; NUMBER keeps ports apart
  local label=$1 number=$2
  shift 2
  MASTER_ADDR=$1 MASTER_PORT=$((port + number)) timeout --kill-after=10 "$SECONDS_EACH" \
    srun --export=ALL --kill-on-bad-exit=1 "${cores[@]}" "${SRUN[@]}" \
    --nodes=$# --ntasks=$(($# * TASKS)) --nodelist="$(IFS=, && echo "$*")" \
    --open-mode=append --output="$LOGS/$label.log" "$RUN" train doctor </dev/null 2>>"$LOGS/$label.log" || return
  if [ -n "$NETWORK" ] && grep -q 'Using network Socket' "$LOGS/$label.log"; then
    echo "error: NCCL uses TCP, not $NETWORK" >>"$LOGS/$label.log"
    return 1
  fi
}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
good=() bad=() running=()
for at in "${!nodes[@]}"; do
  check "${nodes[at]}" "$at" "${nodes[at]}" &
  running[at]=$!
done
for at in "${!nodes[@]}"; do
  if wait "${running[at]}"; then good+=("${nodes[at]}"); else bad+=("${nodes[at]}"); fi
done
if [ ${#good[@]} -gt 1 ] && ! check together 0 "${good[@]}"; then
  echo "the good nodes fail together; neighbours:"
  for first in 0 1; do # pairs that share no node, at the same time
    for ((at = first; at + 1 < ${#good[@]}; at += 2)); do
      next=${good[at + 1]}
      check "${good[at]}-$next" "$at" "${good[at]}" "$next" &
      running[at]=$!
    done
    for ((at = first; at + 1 < ${#good[@]}; at += 2)); do
      next=${good[at + 1]}
      if wait "${running[at]}"; then continue; fi
      echo "FAULT between ${good[at]} and $next: $LOGS/${good[at]}-$next.log"
      bad+=("${good[at]}" "$next")
    done
  done
  [ ${#bad[@]} -gt 0 ] || bad=("${good[@]}")
fi
grep -h -E '^(device|ranks|nodes) ' "$LOGS/together.log" "$LOGS/${good[0]:-none}.log" 2>/dev/null
grep -h -m 1 -E 'Using network|Selected provider' "$LOGS"/*.log | head -n 1
for node in "${bad[@]}"; do
  if [ -s "$LOGS/$node.log" ]; then echo "FAULT $node: $(grep -E '^(FAULT|error|srun: error)' "$LOGS/$node.log" | head -n 1)"; fi
done
while read -r _ node told; do
  echo "SLOW $node: $told"
  bad+=("$node")
done < <(grep -h '^slow ' "$LOGS/together.log" 2>/dev/null)
if [ ${#bad[@]} = 0 ]; then
  echo "PREFLIGHT OK: ${#nodes[@]} nodes, $((${#nodes[@]} * TASKS)) tasks"
  exit 0
fi
list=$(printf '%s\n' "${bad[@]}" | sort -u | paste -sd ,)
echo "$list" >"$LOGS/exclude"
echo "PREFLIGHT FAILED, logs in $LOGS; leave these out: --sbatch exclude=$list"
exit 1
