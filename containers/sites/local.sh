# Any other machine with Slurm, or without. Copy it for a site of your own: its name is what --site takes.
# shellcheck shell=bash disable=SC2034  # used by containers/run and by those who read it

# sbatch, for GPUs and for CPUs: one task, in the default partition; `--sbatch ntasks-per-node=4` changes that
SITE_GPU='--ntasks-per-node=1 --cpus-per-task=1 --time=1-00:00:00'
SITE_CPU_1='--cpus-per-task=1 --mem=64000 --time=1-00:00:00'
SITE_SRUN=''
# the network between nodes, if TCP is a fault for a preflight: 'IB', or the name of an NCCL plugin
SITE_NET=''
SITE_BIND=''
SITE_GPU_FLAG=''
if [ -e /dev/nvidiactl ]; then SITE_GPU_FLAG='--nv'; fi
