# Leonardo (CINECA, Italy): NVIDIA A100-64GB, InfiniBand. One line a fact: its purpose, its source, and the date of the source.
# Lines NAME='…' are also read by `train submit` and `convert submit`, which run nothing of this file.
# shellcheck shell=bash disable=SC2034  # used by containers/run and by those who read it

# sbatch, for GPUs: Booster nodes have 4 GPUs, 32 cores, 494000 MB to ask for (docs.hpc.cineca.it/hpc/leonardo.html, 2026-11)
SITE_GPU='--partition=boost_usr_prod --gpus-per-node=4 --ntasks-per-node=4 --cpus-per-task=8 --mem=494000 --exclusive --time=1-00:00:00'
# sbatch, for CPUs: the first one that is sufficient. The serial partition is free of charge and has internet (the same page).
# DCGP has a budget of its own (docs.hpc.cineca.it/hpc/hpc_intro.html): without one, --partition boost_usr_prod
SITE_CPU_1='--partition=lrd_all_serial --cpus-per-task=4 --mem=30800 --time=04:00:00'
SITE_CPU_2='--partition=dcgp_usr_prod --cpus-per-task=16 --mem=494000 --time=1-00:00:00'
SITE_CPU_3='--partition=boost_usr_prod --cpus-per-task=8 --mem=494000 --time=1-00:00:00'
# srun: one socket, 8 cores a task, in order
SITE_SRUN='--cpu-bind=cores'
# the network between nodes, by NCCL's name: a preflight that finds TCP instead fails
SITE_NET='IB'
# bound into the image: $WORK and $SCRATCH are below them (the same page)
SITE_BIND='/leonardo,/leonardo_work,/leonardo_scratch'
# the driver's libraries; NCCL has its own InfiniBand transport, so nothing else comes from the host
SITE_GPU_FLAG='--nv'

# partitions whose nodes reach the internet (the same page)
SITE_ONLINE='lrd_all_serial'

# NCCL finds ib0 and mlx5 by itself. Only where its log says otherwise (NCCL docs):
# export NCCL_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5
