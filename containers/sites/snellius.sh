# Snellius (SURF, Netherlands): 4 A100 or H100 a node, CPU nodes beside. One line a fact: its purpose, its source, and the date of the source.
# Lines NAME='…' are also read by `train submit` and `convert submit`, which run nothing of this file.
# Nothing of it was tried on the machine. SURF: servicedesk.surf.nl/wiki/spaces/WIKI/pages/30660209, "Snellius partitions", read 2026-11.
# shellcheck shell=bash disable=SC2034  # used by containers/run and by those who read it

# sbatch, for GPUs: 4 A100, 72 cores, 480 GiB a node; `--partition gpu_h100 --sbatch cpus-per-task=16` for H100 (SURF)
SITE_GPU='--partition=gpu_a100 --gpus-per-node=4 --ntasks-per-node=4 --cpus-per-task=18 --mem=491520 --exclusive --time=5-00:00:00'
# sbatch, for CPUs: the smallest part of a node is an eighth, 16 cores and 28 GiB of rome, 24 and 42 GiB of genoa (SURF)
SITE_CPU_1='--partition=rome --cpus-per-task=16 --mem=229376 --time=5-00:00:00'
SITE_CPU_2='--partition=genoa --cpus-per-task=24 --mem=344064 --time=5-00:00:00'
# srun: 18 cores a task, in order
SITE_SRUN='--cpu-bind=cores'
# the network between nodes, by NCCL's name: a preflight that finds TCP instead fails
SITE_NET='IB'
# bound into the image: project spaces and the shared scratch (not checked)
SITE_BIND='/projects,/scratch-shared'
# the driver's libraries
SITE_GPU_FLAG='--nv'
