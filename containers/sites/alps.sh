# Alps, Clariden (CSCS, Switzerland): 4 GH200 a node, ARM64, Slingshot. One line a fact: its purpose, its source, and the date of the source.
# Lines NAME='…' are also read by `train submit` and `convert submit`, which run nothing of this file.
# Nothing of it was tried on the machine. CSCS: docs.cscs.ch/clusters/clariden (github.com/eth-cscs/cscs-docs at 80abed1, 2026-08).
# shellcheck shell=bash disable=SC2034  # used by containers/run and by those who read it

# sbatch, for GPUs: 4 GPUs and 288 cores a node, which is not shared; low gives a day, debug 90 minutes (CSCS)
SITE_GPU='--partition=normal --gpus-per-node=4 --ntasks-per-node=4 --cpus-per-task=72 --time=12:00:00'
# sbatch, for CPUs: Clariden has no node without GPUs, and all of a node is billed; xfer is for transfers alone (CSCS). --mem: not checked
SITE_CPU_1='--partition=normal --cpus-per-task=72 --mem=400000 --time=12:00:00'
# srun: one chip, 72 cores a task, in order
SITE_SRUN='--cpu-bind=cores'
# the network between nodes: the plugin's name (CSCS docs, 2026); a preflight that finds TCP instead fails
SITE_NET='AWS Libfabric'
# bound into the image; the site's own way is its container engine, an EDF file in the place of Apptainer (CSCS), which is not used here
SITE_BIND='/capstor,/iopsstor'
# the driver's libraries
SITE_GPU_FLAG='--nv'

# a missing plugin is an error, instead of a silent fallback to TCP
export NCCL_NET="$SITE_NET"
