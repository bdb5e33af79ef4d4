# JUWELS Booster (JSC, Germany): 4 A100 a node, InfiniBand. One line a fact: its purpose, its source, and the date of the source.
# Lines NAME='…' are also read by `train submit` and `convert submit`, which run nothing of this file.
# Nothing of it was checked on the machine: scontrol show partition; sinfo -h -o '%P %l %m %c'. The pages: apps.fz-juelich.de/jsc/hps/juwels.
# shellcheck shell=bash disable=SC2034  # used by containers/run and by those who read it

# sbatch, for GPUs: 4 GPUs, 48 cores a node; develbooster gives two hours (not checked)
SITE_GPU='--partition=booster --gres=gpu:4 --ntasks-per-node=4 --cpus-per-task=12 --exclusive --time=1-00:00:00'
# sbatch, for CPUs: nodes of the Cluster, without GPUs, 48 cores and 96 GB; mem192 has 192 GB (not checked)
SITE_CPU_1='--partition=batch --cpus-per-task=48 --mem=85000 --time=1-00:00:00'
SITE_CPU_2='--partition=mem192 --cpus-per-task=48 --mem=180000 --time=1-00:00:00'
# srun: 12 cores a task, in order
SITE_SRUN='--cpu-bind=cores'
# the network between nodes, by NCCL's name: a preflight that finds TCP instead fails
SITE_NET='IB'
# bound into the image: compute nodes read /p (users of JUPITER and JUWELS, 2026-08)
SITE_BIND='/p'
# the driver's libraries
SITE_GPU_FLAG='--nv'
# partitions whose nodes reach the internet: none; OpenEuroLLM's jobs are offline there (oellm-autoexp at c6d0cc0,
# config/slurm/juwels.yaml, 2026-06)
SITE_ONLINE=''
