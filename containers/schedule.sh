#!/usr/bin/env bash
# bash schedule.sh JOB N [BENCH]: at most N jobs in a chain, an evaluation after each that has written a checkpoint.
# JOB is the settings of a training (.yml), or the output of `train submit -n`. job_log.txt lists the jobs.
set -euo pipefail
if [ $# -lt 2 ] || [ ! -f "$1" ]; then echo "usage: bash schedule.sh JOB N [BENCH]" >&2; exit 2; fi
job=$1 links=$2 bench=${3-}
if [ -n "$bench" ] && [ ! -f "$bench" ]; then
  echo "note: there is no $bench, so nothing is evaluated" >&2
  bench=''
fi
export VITRUVIAN_JOB_LOG=$PWD/job_log.txt
case $job in
  *.yml | *.yaml)
    : >job_log.txt
    exec train submit "$job" --jobs "$links" ${bench:+--bench "$bench"} ;;
esac
if ! grep -q '^COMMAND=(.*train run' "$job"; then
  echo "error: $job is not a job of \`train submit\`: it cannot know when a training is finished" >&2
  echo "hint: train submit CONFIG.yml -n > $job" >&2
  exit 2
fi
if [ -n "$bench" ]; then bench=$(realpath "$bench"); fi
conf=${SLURM_CONF-}
unset "${!SLURM_@}" # those of a job that this may run in
if [ -n "$conf" ]; then export SLURM_CONF=$conf; fi
id=$(VITRUVIAN_LINKS=$links VITRUVIAN_BENCH=$bench sbatch --parsable "$job")
echo "${id%%;*} link 1" >job_log.txt
echo "Submitted batch job ${id%%;*}"
