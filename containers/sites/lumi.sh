# LUMI (CSC, Finland): AMD MI250X, Slingshot. One line a fact: its purpose, its source, and the date of the source.
# Lines NAME='…' are also read by `train submit` and `convert submit`, which run nothing of this file.
# LUMI-training-materials: github.com/Lumi-supercomputer. LAIF: github.com/lumi-ai-factory/laifs-container-recipes. AI-Guide: github.com/Lumi-supercomputer/LUMI-AI-Guide.
# shellcheck shell=bash disable=SC2034  # used by containers/run and by those who read it

# sbatch, for GPUs: whole nodes of 8 dies with 7 cores each; 8 of 64 cores belong to the system (LUMI-training-materials, 2026-06)
SITE_GPU='--partition=standard-g --gpus-per-node=mi250:8 --ntasks-per-node=8 --cpus-per-task=7 --mem=0 --exclusive=user --hint=nomultithread --time=2-00:00:00'
# sbatch, for CPUs: LUMI-C, so that no GPU is billed; --mem (MB) and --time are the maximum
# (nodes of 256 GB, of 512 GB and 1 TB for larger requests: lumi-userguide, partitions.md, 2026; not checked on the
# machine: scontrol show partition small)
SITE_CPU_1='--partition=small --cpus-per-task=16 --mem=960000 --time=3-00:00:00 --hint=nomultithread'
# srun, on whole nodes: the cores nearest to each die. Dies 0,1 are on NUMA 3; 2,3 on 1; 4,5 on 0; 6,7 on 2
# (LUMI-training-materials, 2026-06)
SITE_SRUN='--cpu-bind=mask_cpu:0x00fe000000000000,0xfe00000000000000,0x0000000000fe0000,0x00000000fe000000,0x00000000000000fe,0x000000000000fe00,0x000000fe00000000,0x0000fe0000000000'
# the network between nodes: the plugin's name in ROCm 7 images (CSCS docs, 2026); a preflight that finds TCP instead fails
SITE_NET='AWS Libfabric'
# bound into the image, as the module lumi-aif-singularity-bindings does (LUMI-training-materials, 2026-06)
SITE_BIND='/pfs,/scratch,/projappl,/project,/flash,/appl,/var/spool/slurmd'
# no --rocm: it binds host libraries, and /dev/kfd and /dev/dri are visible anyway (LUMI course, 2026-06)
SITE_GPU_FLAG=''

# the four Slingshot cards; RCCL may otherwise use the management network (LUMI-training-materials, 2026-06)
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
# a missing plugin is an error, instead of a silent fallback to TCP
export NCCL_NET="$SITE_NET"
# not set, although older scripts set it: PHB and 3 hang between nodes (LAIF issues 28 and 30, AI-Guide PR 97, 2026)
unset NCCL_NET_GDR_LEVEL
# the default monitor hangs with remapped memory (AI-Guide PR 118, 2026-09)
export FI_MR_CACHE_MONITOR=userfaultfd
# large jobs overflow Cassini's event queue (LumiOpen/Megatron-LM-lumi, 2025)
export FI_CXI_DEFAULT_CQ_SIZE=131072
# MIOpen's SQLite breaks on Lustre (ROCm/MIOpen 1878, AI-Guide PR 108, 2026); /tmp is the node's memory
export MIOPEN_USER_DB_PATH="$CACHE/miopen" MIOPEN_CUSTOM_CACHE_DIR="$CACHE/miopen"
