# MareNostrum 5 (BSC, Spain): 4 H100 a node in ACC, CPUs alone in GPP, InfiniBand. One line a fact: its purpose, its source, and the date of the source.
# Lines NAME='…' are also read by `train submit` and `convert submit`, which run nothing of this file.
# Nothing of it was tried on the machine. BSC: bsc.es/supportkc/docs/MareNostrum5, as copied by its users, 2026.
# shellcheck shell=bash disable=SC2034  # used by containers/run and by those who read it

# sbatch, for GPUs: a QOS is required, that of EuroHPC projects is acc_ehpc; 20 of 80 cores for each GPU (BSC)
SITE_GPU='--qos=acc_ehpc --gres=gpu:4 --ntasks-per-node=4 --cpus-per-task=20 --exclusive --time=3-00:00:00'
# sbatch, for CPUs: 112 cores of 2 GB each; `--sbatch qos=gp_bsccs`, gp_resa … for others than EuroHPC projects (BSC: bsc_queues lists yours)
SITE_CPU_1='--qos=gp_ehpc --cpus-per-task=1 --mem=224000 --time=3-00:00:00'
# memory comes with cores: --mem is refused (users, 2026), so as many cores are asked for as have enough
SITE_CORE_MB='2000'
# srun: cores in order
SITE_SRUN='--cpu-bind=cores'
# the network between nodes, by NCCL's name: a preflight that finds TCP instead fails
SITE_NET='IB'
# bound into the image: home, projects and scratch are below it (users, 2026)
SITE_BIND='/gpfs'
# the driver's libraries
SITE_GPU_FLAG='--nv'

# partitions whose nodes reach the internet: none (OpenEuroLLM/oellm-autoexp at c6d0cc0, README.md, 2026-08)
SITE_ONLINE=''

# nor do login nodes (the same)
export HF_HUB_OFFLINE=1 WANDB_MODE=offline
