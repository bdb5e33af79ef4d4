"""Judge: what does stock Megatron-LM compute, fed with our run folder and our flags alone?

The real `pretrain_gpt.py` of the newest release as far as a CPU goes: `parse_args`, `load_args_from_checkpoint`,
`validate_args`, `gpt_config_from_args` and its builder, `load_checkpoint(strict=True)`. It knows nothing of a Hugging
Face config. What it computes of the ids is saved; the tests compare that with transformers.

    python stock_judge.py JOBS.json

JOBS.json is a list of {"run": FOLDER, "ids": [[...]], "out": FILE.npy, "ranks": N, "more": [...]}; the answer of each
is a line of JSON: null, or the last lines of what failed. A change of the tree that our flags ask for is made, in the
source of the function that they name. Its Python is that of the environment of megatron-core 0.19.2 (make test-stock),
without transformers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # which every run of Megatron with tensor ranks sets

import megatron.core.fusions.fused_layer_norm as fused_norm
import megatron.core.models.backends as backends
import megatron.core.tensor_parallel.random as random_state
import megatron.core.transformer.multi_latent_attention as latent_attention
import megatron.core.transformer.transformer_block as block
import megatron.training.argument_utils as argument_utils
import numpy as np
import te_layers
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.training import checkpointing, global_vars
from megatron.training.arguments import parse_args, validate_args
from megatron.training.models.gpt import GPTModelBuilder
from torch.overrides import TorchFunctionMode

FLAGS = "megatron_flags.txt"
ANY_RUN = (
    "--micro-batch-size 1 --tokenizer-type NullTokenizer --lr 1e-4 --train-iters 1 "
    "--no-gradient-accumulation-fusion --no-bias-dropout-fusion "
    "--no-bias-swiglu-fusion --distributed-backend gloo --use-cpu-initialization --finetune"
)
"""What any run gives, and switched off what a CPU lacks: Apex's kernel that sums up gradients, and compilers for the
fused bias, dropout and SwiGLU. None of it changes what a model computes, and each flag that a model needs is ours."""
LIMIT = 120.0
"""Seconds for one case."""


class CpuForCuda(TorchFunctionMode):
    """Gives the CPU to calls that name the cuda device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class WideAttention(DotProductAttention):
    """The local attention with values that are not as wide as keys: only the width of what it returns is its own."""

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class TorchKernel:
    """torch's LayerNorm in the place of Apex's kernel, with its arguments (fusions/fused_layer_norm.py)."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, shape: Any, eps: float) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)

    apply = forward


class LocalNorm:
    """The norm of the local layers: with Apex's class where weights are stored minus 1, which torch's refuses."""

    def __new__(cls, config: Any, hidden_size: int, **kwargs: Any) -> Any:
        centred = config.layernorm_zero_centered_gamma
        return (fused_norm.FusedLayerNorm if centred else WrappedTorchNorm)(config, hidden_size, **kwargs)


def patch_for_cpu() -> None:
    """Replace the calls of CUDA that are made even when nothing is on a GPU."""
    te_layers.install()
    fused_norm.HAVE_FUSED_LAYER_NORM, fused_norm.FusedLayerNormAffineFunction = True, TorchKernel
    block.LayerNormImpl = LocalNorm
    backends.LocalSpecProvider.layer_norm = lambda self, rms_norm=False, for_qk=False, **kwargs: LocalNorm
    backends.LocalSpecProvider.core_attention = lambda self: WideAttention
    latent_attention.HAVE_TE = False
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    random_state.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()


# --- the changes that users are told ---------------------------------------------------------------------------------

CHANGE = re.compile(r"# .*: in (\w+) in ([\w/]+)\.py, (before|after) (.+) add (.+)")


def change(text: str) -> None:
    """Make the changes that flags ask for, in the source of the real functions."""
    for name, path, side, beside, line in CHANGE.findall(text):
        module = sys.modules[path.replace("/", ".")]
        lines = inspect.getsource(getattr(module, name)).splitlines()
        (at,) = [number for number, line in enumerate(lines) if beside in line]
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines.insert(at + (side == "after"), indent + line)
        exec("\n".join(lines), vars(module))


def split(text: str) -> list[str]:
    """Flags as a shell splits them."""
    script = f"flags=({text}); printf '%s\\0' \"${{flags[@]}}\""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


# --- a case ----------------------------------------------------------------------------------------------------------


def arguments(job: dict[str, Any]) -> Any:
    """The namespace that pretrain_gpt.py would have (arguments.py `parse_and_validate_args`)."""
    sys.argv = ["pretrain_gpt.py", *job["flags"], "--load", job["run"], *ANY_RUN.split(), *job.get("more", ())]
    args = parse_args()
    if args.use_checkpoint_args:
        checkpointing.load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        checkpointing.load_args_from_checkpoint(args)
    validate_args(args)
    return args


@torch.no_grad()
def judge(job: dict[str, Any]) -> None:
    """One case, on this rank."""
    args = arguments(job)
    global_vars.set_args(args)
    ps.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=1,
    )
    config = argument_utils.gpt_config_from_args(args)
    config.parallel_output = False  # gathered logits, for the comparison
    chunks = GPTModelBuilder(config).build_distributed_models(
        ProcessGroupCollection.use_mpu_process_groups(), wrap_with_ddp=False, mixed_precision_wrapper=None
    )
    checkpointing.load_checkpoint(chunks, None, None, strict=True)
    logits = forward([chunk.float().eval() for chunk in chunks], torch.tensor(job["ids"]))
    if logits is not None and ps.get_tensor_model_parallel_rank() == ps.get_data_parallel_rank() == 0:
        np.save(job["out"], logits.float().numpy())
    dist.barrier()


def forward(chunks: list[Any], ids: torch.Tensor) -> torch.Tensor | None:
    """Through all stages; logits on the last one, None elsewhere. Without a mask the layers make their own."""
    positions, y = torch.arange(ids.shape[1])[None].expand_as(ids), None
    for chunk in chunks:
        if not chunk.pre_process:
            x = torch.empty(ids.shape[1], ids.shape[0], chunk.config.hidden_size)
            dist.recv(x, src=ps.get_pipeline_model_parallel_prev_rank())
            chunk.set_input_tensor(x)
        y = chunk(ids, positions, None)
        if not chunk.post_process:
            dist.send(y.contiguous(), dst=ps.get_pipeline_model_parallel_next_rank())
            y = None
    return y


def rank_main(job: dict[str, Any], rank: int, folder: str) -> None:
    """Be a rank: its exit status is 0 when all went well."""
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]))
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", store, timedelta(seconds=60), job["ranks"], rank)
        change((Path(job["run"]) / FLAGS).read_text())
        with CpuForCuda():
            judge(job)
        code = 0
    except SystemExit as ended:
        print("ended with", ended.code)
    finally:
        if sys.exc_info()[0]:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(job: dict[str, Any]) -> str | None:
    """Fork the ranks of a case; what failed, or None."""
    with tempfile.TemporaryDirectory() as folder:
        text = (Path(job["run"]) / FLAGS).read_text()
        job["flags"], children = split(text), []
        for rank in range(job["ranks"]):
            children.append(os.fork())
            if not children[-1]:
                rank_main(job, rank, folder)
        failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]
        return "\n".join(Path(f"{folder}/log{rank}").read_text()[-3000:] for rank in failed[:2]) or None


def main() -> None:
    """Judge each case in turn."""
    torch.set_num_threads(1)
    patch_for_cpu()
    gc.freeze()
    for job in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(run(job)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
