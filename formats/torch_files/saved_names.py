"""Checks files whose name has the rank or layer of their content: it has to be the name under which they were saved.

torch.save stores the stem of the file's name in the archive, as the root folder of its entries (`PyTorchStreamWriter`
in caffe2/serialize/inline_container.cc, torch 2.13). A file under the name of another rank has the same size, the same
keys and the same shapes, so that nothing else in the file may show the mistake. Shards of Hugging Face
(`pytorch_model-00001-of-00002.bin`) are not in the table: their tensors have names, and missing tensors are reported.
Nor are the files of Megatron, whose rank is in the name of their folder.
"""

from __future__ import annotations

import re
from pathlib import Path

from formats.errors import SourceError, short

MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
MODEL_OF_STAGE_3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
MODEL_DUMP = re.compile(
    r"(?:pytorch_model_fsdp(?:_0)?_rank|pytorch_model_rank|model_world_size_(?P<world>\d+)_rank_)"
    r"(?P<rank>\d+)\.(?:bin|pt)"
)
OPTIM_DUMP = re.compile(r"optim(?:izer_0|_world_size_(?P<world>\d+))_rank_?(?P<rank>\d+)\.(?:bin|pt)")
OPTIM_OF_NANOTRON = re.compile(
    r"optimizer_pp-(?P<pp>\d+)-of-(?P<pps>\d+)(?:_dp-(?P<dp>\d+)-of-(?P<dps>\d+))?_tp-(?P<tp>\d+)-of-(?P<tps>\d+)"
    r"_exp-(?P<exp>\d+)-of-(?P<exps>\d+)\.pt"
)
UNIVERSAL = re.compile(r"(fp32|exp_avg|exp_avg_sq)\.pt")
NUMBERED = (MODEL, MODEL_OF_STAGE_3, LAYER, OPTIM, MODEL_DUMP, OPTIM_DUMP, OPTIM_OF_NANOTRON, UNIVERSAL)
"""Each group of these patterns is a rank, a layer, a world size or an optimizer state of the file's content.

Facts: deepspeed 0.19.8 (runtime/engine.py, checkpoint/constants.py), DeeperSpeed's pipeline layers, accelerate 1.15.0
(utils/fsdp_utils.py), verl (utils/checkpoint/fsdp_checkpoint_manager.py), nanotron at 2411b022
(serialize/optimizer.py `optimizer_filename`).
"""


def require_own_name(path: Path, root: str) -> None:
    """Check that a file has the rank, layer or state in its name under which it was saved.

    Args:
        path: the file.
        root: the root folder of the file's archive, which is `archive` where torch.save wrote to a stream.

    Raises:
        SourceError: the file was saved under the name of another rank, layer or state.
    """
    for kind in NUMBERED:
        now, then = kind.fullmatch(path.name), kind.fullmatch(root + path.suffix)
        pairs = zip(now.groups(), then.groups(), strict=True) if now and then else ()
        if any(ours and theirs and ours.lstrip("0") != theirs.lstrip("0") for ours, theirs in pairs):
            raise SourceError(
                f"{path} was saved as {short(root)}: files are mixed up",
                "copy the files of all ranks again, each under its own name; a file that was renamed on purpose has to "
                "be saved again with torch.save",
            )
