# JUPITER Booster (JSC, Germany): 4 GH200 a node, ARM64, InfiniBand. One line a fact: its purpose, its source, and the date of the source.
# Lines NAME='…' are also read by `train submit` and `convert submit`, which run nothing of this file.
# Nothing of it was tried on the machine. JSC: apps.fz-juelich.de/jsc/hps/jupiter. Users: reports of its users, 2026-05 and 2026-08.
# shellcheck shell=bash disable=SC2034  # used by containers/run and by those who read it

# sbatch, for GPUs: 4 GPUs and 288 cores a node; the limit of time is not checked: OpenEuroLLM asks for twelve hours
# (oellm-autoexp at c6d0cc0, config/slurm/jupiter.yaml, 2026-07), other projects were refused above six (users, 2026-05)
SITE_GPU='--partition=booster --gres=gpu:4 --ntasks-per-node=4 --cpus-per-task=72 --exclusive --time=1-00:00:00'
# sbatch, for CPUs: booster is the only partition (users, 2026-05), and all of a node is billed; --mem: not checked on the
# machine (scontrol show partition booster; sinfo -h -p booster -o %m)
SITE_CPU_1='--partition=booster --cpus-per-task=72 --mem=400000 --time=1-00:00:00'
# srun: one chip, 72 cores a task, in order
SITE_SRUN='--cpu-bind=cores'
# the network between nodes, by NCCL's name: a preflight that finds TCP instead fails
SITE_NET='IB'
# bound into the image: compute nodes see /e alone, and no /p (users, 2026-05 and 2026-08)
SITE_BIND='/e'
# the driver's libraries
SITE_GPU_FLAG='--nv'
# partitions whose nodes reach the internet: none (users, 2026-05)
SITE_ONLINE=''
