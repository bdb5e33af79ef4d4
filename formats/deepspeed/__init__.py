"""DeepSpeed: ZeRO states, universal checkpoints, GPT-NeoX, and Megatron-DeepSpeed."""

from formats.format import Format

SIGNS = r".*model_states\.pt|latest|latest_universal"
FOLDERS = "formats.deepspeed.folders"

ZERO = Format(
    "zero",
    "DeepSpeed ZeRO stages 0 to 3 (DeepSpeed, HF Trainer, accelerate); written as universal checkpoints",
    "for DeepSpeed use `convert zero2hf`",
    "formats.deepspeed.zero",
    "formats.deepspeed.optimizer",
    "zero2hf",
    ("verbatim", "allow_missing", "drop", "only", "tag", "weights", "adapter"),
    SIGNS,
    folders=FOLDERS,
)
NEOX = Format(
    "neox",
    "GPT-NeoX: global_stepN with mp_rank or layer files, and its ZeRO partitions, or universal",
    "for GPT-NeoX use `convert neox2hf`",
    "formats.deepspeed.neox.checkpoint",
    "formats.deepspeed.optimizer",
    "neox2hf",
    ("tag", "weights", "gqa_layout"),
    SIGNS,
    ranked=True,
    replicas="drift",  # of norms between tensor parallel ranks, in every long training: the mean is wanted, and told
    folders=FOLDERS,
)
MDS = Format(
    "megatron_deepspeed",
    "Megatron-DeepSpeed: global_stepN with layer files of a pipeline, args inside, its ZeRO partitions, or universal",
    "for Megatron-DeepSpeed use `convert zero2hf` or `hf2mds`",
    "formats.deepspeed.mds.checkpoint",
    "formats.deepspeed.optimizer",
    "zero2hf",
    ("tag", "weights", "gqa_layout"),
    SIGNS,
    ranked=True,
    replicas="drift",  # of norms, as in GPT-NeoX
    folders=FOLDERS,
)
