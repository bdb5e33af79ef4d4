"""Judge: does a Megatron "classic" checkpoint hold the same model as a Hugging Face folder?

The real megatron-core (0.16.1, local layer spec, CPU, gloo; with linear attention stand-ins for Transformer Engine's,
te_layers.py) is built from the Hugging Face config alone,
loads the checkpoint with strict=True and must give the logits of transformers. What the checkpoint's `args`
claim is compared with the Hugging Face config as well. Exit status 0 means that everything agrees.

    torchrun --nproc-per-node RANKS megatron_judge.py MEGATRON_DIR=HF_DIR [MEGATRON_DIR=HF_DIR ...] [--save OUT ...]

Several pairs of one topology are judged in one run, and the tests fork its ranks, because starting the framework takes
longest.

Line numbers in the docstrings are those of megatron-core 0.16.1, relative to megatron/core/.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import os
import re
import sys
import warnings
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

warnings.filterwarnings("ignore")  # megatron-core announces every missing accelerator package
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # fused activations need no compiler

import megatron.core.fusions.fused_layer_norm as megatron_norm
import megatron.core.tensor_parallel.random as megatron_random
import megatron.core.transformer.moe.moe_utils as megatron_moe
import megatron.core.transformer.multi_latent_attention as megatron_mla
import megatron.core.transformer.transformer_block as megatron_block
import te_layers
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

FILE = "model_optim_rng.pt"
STATE = ("nemotron_h",)
"""Hybrids, whose layers are one block each (models/mamba/mamba_model.py)."""
LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")
SIGMOID = ("dots1", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "solar_open", "hy_v3")
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
EXPERTS = (
    "mixtral",
    *STATE,
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "gpt_oss",
    "deepseek_v2",
    *SIGMOID,
)
PLAIN = ("arcee", *STATE, "gpt2", "gpt_neox", "jais2", "nemotron", "starcoder2")
WITHOUT_BIAS = ("arcee", *STATE)
"""Those of `PLAIN` that have RMSNorms."""
EPSILONS = ("norm_epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps", "layer_norm_epsilon")
LLAMAS = (
    "cwm", "ernie4_5", "helium", "internlm3", "iquestcoder", "llama", "ministral", "mistral", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3",
)  # fmt: skip
DENSE = (*LLAMAS, *PLAIN, "youtu")
OUTSIDE = ("opensci",)
"""Those that no release of transformers has."""
INSIDE = (*DENSE, *EXPERTS, "qwen3_5_text")
FAMILIES = (*INSIDE, *OUTSIDE)
for _family in OUTSIDE:
    import_module(f"tests.{_family}")
for _family in (name.removesuffix("_text") for name in INSIDE):  # else each rank that is forked imports them anew
    if find_spec(_class_of := f"transformers.models.{_family}.modeling_{_family}"):
        import_module(_class_of)
GELU = {"gelu_pytorch_tanh": True, "gelu_new": True, "gelu": False, "relu2": False}
"""Activation of an MLP without a gate: bias_activation_fusion (fusions/fused_bias_gelu.py:20)."""
LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
StateDict = dict[str, Any]


class JudgementError(Exception):
    """The checkpoint or the Hugging Face folder cannot be judged, or they differ."""


class CpuForCuda(TorchFunctionMode):
    """Gives the CPU to calls that name the cuda device: the masks of transformer/utils.py:35 and :40."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class WideAttention(DotProductAttention):
    """The local attention with values that are not as wide as keys, which only Transformer Engine's is told.

    It computes with what it is given, but for the width of what it returns (transformer/dot_product_attention.py:246).
    """

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class TorchKernel:
    """torch's LayerNorm in the place of Apex's kernel, with its arguments (fusions/fused_layer_norm.py:160)."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, shape: Any, eps: float) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)

    apply = forward


class LocalNorm:
    """The norm of the local layers: with Apex's class where weights are stored minus 1, which torch's refuses."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, **kwargs: Any) -> Any:
        centred = config.layernorm_zero_centered_gamma
        return (megatron_norm.FusedLayerNorm if centred else WrappedTorchNorm)(config, hidden_size, **kwargs)


@functools.cache
def gloo_device() -> Any:
    """A thread that listens to sockets: it wakes every 10 ms, and every group would have one of its own."""
    return dist.ProcessGroupGloo.create_default_device()


def share_gloo_device() -> None:
    """Let the groups of a rank, of which megatron-core makes more than fifty, have one device."""
    begin = dist.ProcessGroupGloo.__init__

    def init(self: dist.ProcessGroupGloo, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [gloo_device()], timeout
        begin(self, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = init


def patch_for_cpu() -> None:
    """Replace the CUDA calls that megatron-core makes even when nothing is on a GPU.

    current_device: models/common/embeddings/rotary_pos_embedding.py:162.
    fork, for dropout even when it is 0: tensor_parallel/random.py:243.
    cuda() of a tied head, while building: models/common/language_module/language_module.py:244.
    HAVE_TE, which is true without it: transformer/multi_latent_attention.py:185.
    Apex, of norms whose weights are stored minus 1: fusions/fused_layer_norm.py:26.
    te_general_gemm, of a router where Transformer Engine can be imported: transformer/moe/moe_utils.py.
    """
    share_gloo_device()
    te_layers.install()
    te_layers.install_state_space()
    megatron_norm.HAVE_FUSED_LAYER_NORM, megatron_norm.FusedLayerNormAffineFunction = True, TorchKernel
    megatron_block.LayerNormImpl = LocalNorm
    LocalSpecProvider.layer_norm = lambda self, rms_norm=False, for_qk=False: LocalNorm
    megatron_moe.te_general_gemm = None
    megatron_mla.HAVE_TE = False
    LocalSpecProvider.core_attention = lambda self: WideAttention
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    megatron_random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()


class Topology(NamedTuple):
    """How the checkpoint is cut. `vpp` is None without virtual chunks, as in megatron-core."""

    tp: int
    pp: int
    vpp: int | None
    uneven: dict[str, Any]  # TransformerConfig's fields for uneven pipelines: transformer_config.py:62-100
    ep: int = 1
    etp: int | None = None

    @property
    def spread(self) -> int:
        """How many ranks hold the experts of a stage: those of the first replica write the files."""
        return self.ep * (self.etp or self.tp)

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        return max(self.tp, self.spread) * self.pp

    @classmethod
    def read(cls, claims: argparse.Namespace, options: argparse.Namespace) -> Topology:
        """The command line first, then what the file's args say."""

        def pick(option: int | None, name: str, default: Any = None) -> Any:
            return option if option is not None else getattr(claims, name, default)

        pp = pick(options.pp, "pipeline_model_parallel_size", 1)
        vpp = pick(options.vpp, "virtual_pipeline_model_parallel_size")
        layout = pick(None, "pipeline_model_parallel_layout")
        if isinstance(layout, str) and vpp is None:
            vpp = PipelineParallelLayerLayout.get_num_stages_from_str(layout) // pp
        uneven = {
            "num_layers_in_first_pipeline_stage": pick(options.first, "decoder_first_pipeline_num_layers"),
            "num_layers_in_last_pipeline_stage": pick(options.last, "decoder_last_pipeline_num_layers"),
            "pipeline_model_parallel_layout": layout,
        }
        for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
            uneven[name] = pick(None, name, False)
        tp = pick(options.tp, "tensor_model_parallel_size", 1)
        ep, etp = pick(None, "expert_model_parallel_size", 1), pick(None, "expert_tensor_parallel_size")
        return cls(tp, pp, vpp if vpp and vpp > 1 else None, uneven, ep or 1, etp)

    def folder(self, tp_rank: int, pp_rank: int, ep_rank: int = 0) -> str:
        """mp_rank_KK without a pipeline, mp_rank_KK_PPP with one; _EEE behind it where experts are spread.

        So megatron/training/checkpointing.py `get_checkpoint_name` does.
        """
        pipeline, experts = f"_{pp_rank:03d}" if self.pp > 1 else "", f"_{ep_rank:03d}" if self.ep > 1 else ""
        return f"mp_rank_{tp_rank:02d}{pipeline}{experts}"

    def chunks(self) -> list[str]:
        """The file's model keys: `model`, or `model0`, `model1`, ... with virtual chunks."""
        return ["model"] if self.vpp is None else [f"model{i}" for i in range(self.vpp)]


def iteration_folder(root: Path) -> Path:
    """The folder of mp_rank_* folders that `root` means: itself, or what its tracker names."""
    tracker = root / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return root
    word = tracker.read_text().strip()
    return root / ("release" if word == "release" else f"iter_{int(word):07d}")


def load_file(folder: Path) -> dict[str, Any]:
    """One rank's checkpoint file, by plain torch.load."""
    return torch.load(folder / FILE, map_location="cpu", weights_only=False, mmap=True)


def check_folders(folder: Path, topology: Topology) -> None:
    """Exactly one folder for each rank that megatron-core's own groups let write one."""
    folders = {p.parent.name for p in folder.glob(f"mp_rank_*/{FILE}")}
    names: list[Any] = [None] * dist.get_world_size()
    mine = topology.folder(*my_ranks()) if ps.get_expert_data_parallel_rank() == 0 else None
    dist.all_gather_object(names, mine)
    expected = {name for name in names if name}
    if folders != expected:
        raise JudgementError(f"folders found {sorted(folders)}, expected {sorted(expected)}")


def window_fields(c: PreTrainedConfig) -> dict[str, Any]:
    """The sliding window as TransformerConfig fields, empty without one.

    Hugging Face sees W positions with the query's own (masking_utils.py, sliding_window_overlay: kv > q - W),
    megatron-core `left` and the query's own (transformer/utils.py:38: kv >= q - left), hence left = W - 1.
    Layers with full attention are the zeros of window_attn_skip_freq (transformer/utils.py:451).
    """
    window, layers = getattr(c, "sliding_window", None), getattr(c, "layer_types", None)
    if not window or (layers and "sliding_attention" not in layers):
        return {}
    fields: dict[str, Any] = {"window_size": (window - 1, 0)}
    if layers and set(layers) != {"sliding_attention"}:
        fields["window_attn_skip_freq"] = [int(kind == "sliding_attention") for kind in layers]
    return fields


def activation(c: PreTrainedConfig) -> str:
    """The activation, which some call otherwise."""
    names = {"gpt2": "activation_function", "nemotron_h": "mlp_hidden_act"}
    return getattr(c, names.get(c.model_type, "hidden_act"))


def has_experts(c: PreTrainedConfig) -> bool:
    """Whether some layers have; of hybrids some models have none."""
    return c.model_type in EXPERTS and (c.model_type not in STATE or "moe" in c.layers_block_type)


def position_arguments(c: PreTrainedConfig) -> dict[str, Any]:
    """GPTModel's arguments of positions; the other llama3 numbers are fixed: rotary_pos_embedding.py:92-99."""
    if c.model_type == "gpt2":
        return {"position_embedding_type": "learned_absolute"}
    if c.model_type in STATE:
        return {"position_embedding_type": "none"}
    yarn = c.rope_parameters.get("rope_type") == "yarn" and c.model_type not in LATENT
    return {"position_embedding_type": "yarn" if yarn else "rope", **rope_arguments(c)}


def yarn_fields(c: PreTrainedConfig) -> dict[str, Any]:
    """The attributes of YaRN that GPTModel expects of its configuration (gpt_model.py:172), empty without it.

    Without both of its mscale transformers takes 0.1 ln(factor) + 1, as megatron-core does with 1 and 0
    (yarn_rotary_pos_embedding.py:258).
    """
    rope = getattr(c, "rope_parameters", None) or {}
    if rope.get("rope_type") != "yarn":
        return {}
    scales = rope.get("mscale"), rope.get("mscale_all_dim")
    mscale, all_dim = scales if all(scales) else (1.0, 0.0)
    return {
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope.get("beta_fast", 32.0),
        "yarn_beta_slow": rope.get("beta_slow", 1.0),
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": all_dim,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }


def yarn_claims(c: PreTrainedConfig) -> dict[str, Any]:
    """What args must say of it: three have no prefix (argument_utils.py `_apply_yarn_config_from_args` at d98e8a64)."""
    plain = ("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim")
    if c.model_type in LATENT:
        return {name: value for name, value in latent_fields(c).items() if name != "rotary_base"}
    return {name.removeprefix("yarn_") if name in plain else name: value for name, value in yarn_fields(c).items()}


def rope_arguments(c: PreTrainedConfig) -> dict[str, Any]:
    """Those of a rotary embedding."""
    rope = dict(c.rope_parameters)
    kind, base = rope.get("rope_type", "default"), float(rope["rope_theta"])
    if kind not in ("default", "llama3", "yarn"):
        raise JudgementError(f"rope parameters {rope} are beyond this judge")
    both = {"rotary_base": base, "rotary_percent": float(rope.get("partial_rotary_factor") or 1.0)}
    if kind != "llama3":
        return both
    if wrong := {k: rope.get(k) for k, v in LLAMA3_FIXED.items() if rope.get(k) != v}:
        raise JudgementError(f"megatron-core fixes {LLAMA3_FIXED}, the model has {wrong}")
    return {**both, "rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}


def biases(c: PreTrainedConfig) -> dict[str, bool]:
    """Which linear layers have biases (transformer/attention.py, of linear_qkv and linear_proj; transformer/mlp.py)."""
    query = getattr(c, "attention_bias", c.model_type in ("gpt2", "starcoder2", "qwen2", "qwen2_moe"))
    keys = {"seed_oss": "attention_out_bias", "glm4_moe": "none", "helium": "none"}
    output_bias = getattr(c, keys.get(c.model_type, "attention_bias"), c.model_type in ("gpt2", "starcoder2"))
    mlp = getattr(c, "mlp_bias", c.model_type in ("gpt2", "gpt_neox", "starcoder2", "gpt_oss"))
    every = query and output_bias and mlp
    if (output_bias or mlp) and not every:
        raise JudgementError("megatron-core has no biases in some linear layers alone, but for query, key and value")
    return {"add_bias_linear": every, "add_qkv_bias": query and (not every or c.model_type == "gpt_oss")}


def model_fields(c: PreTrainedConfig) -> dict[str, Any]:
    """What describes the model under the same name in TransformerConfig and in a checkpoint's args."""
    plain, tiny = c.model_type in PLAIN, expert_fields(c)
    layer_norm = plain and c.model_type not in WITHOUT_BIAS
    if c.model_type not in FAMILIES or activation(c) not in (GELU if plain else ("silu",)):
        raise JudgementError(f"model_type {c.model_type!r} with {activation(c)!r} is beyond this judge")
    if c.model_type == "gpt2":
        ffn, groups, epsilon = c.n_inner or 4 * c.n_embd, c.n_head, c.layer_norm_epsilon
        dropouts = c.resid_pdrop, c.attn_pdrop
    else:
        ffn, groups = getattr(c, "intermediate_size", None), getattr(c, "num_key_value_heads", c.num_attention_heads)
        alone = c.model_type in ("solar_open", "qwen3_5_moe_text")  # which is the width of nothing else
        ffn = c.moe_intermediate_size if alone else ffn
        dropouts = getattr(c, "residual_dropout", 0.0), getattr(c, "attention_dropout", 0.0)
        epsilon = next(getattr(c, name) for name in EPSILONS if hasattr(c, name))
    if getattr(c, "use_parallel_residual", False):
        raise JudgementError("attention and MLP of megatron-core follow one another")
    rotates = getattr(c, "no_rope_layers", None)
    return {
        "num_layers": c.num_hidden_layers,
        "hidden_size": c.hidden_size,
        "ffn_hidden_size": ffn,
        "num_attention_heads": c.num_attention_heads,
        "num_query_groups": groups,
        "kv_channels": getattr(c, "v_head_dim", None)
        or getattr(c, "head_dim", None)
        or c.hidden_size // c.num_attention_heads,
        "layernorm_epsilon": epsilon,
        "normalization": "LayerNorm" if layer_norm else "RMSNorm",
        "layernorm_zero_centered_gamma": c.model_type in ("nemotron", *LINEAR),
        **biases(c),
        "qk_layernorm": c.model_type in ("qwen3", "qwen3_moe", "dots1", "hy_v3", "opensci", *LATENT, *LINEAR)
        or getattr(c, "use_qk_norm", False),
        "window_attn_skip_freq": window_fields(c).get("window_attn_skip_freq"),
        "no_rope_freq": [1 - rotated for rotated in rotates[: c.num_hidden_layers]] if rotates else None,
        "hidden_dropout": dropouts[0],
        "attention_dropout": dropouts[1],
        **tiny,
        **(gpt_oss_fields(c) if c.model_type == "gpt_oss" else {}),
        **(linear_fields(c) if c.model_type in LINEAR else {}),
        **(state_fields(c) if c.model_type in STATE else {}),
    }


def state_fields(c: PreTrainedConfig) -> dict[str, Any]:
    """State spaces; what is not said of a convolution and of the norm behind a gate is fixed (ssm/mamba_mixer.py)."""
    if (c.conv_kernel, c.layer_norm_epsilon, c.use_conv_bias) != (4, 1e-5, True):
        raise JudgementError("megatron-core has convolutions of 4 tokens with biases, and an epsilon of 1e-5")
    return {
        "is_hybrid_model": True,
        "mamba_state_dim": c.ssm_state_size,
        "mamba_head_dim": c.mamba_head_dim,
        "mamba_num_groups": c.n_groups,
        "mamba_num_heads": c.mamba_num_heads,
    }


def linear_fields(c: PreTrainedConfig) -> dict[str, Any]:
    """Linear attention, and the gate of the attention beside it (transformer/transformer_config.py:275, :282)."""
    return {
        "experimental_attention_variant": "gated_delta_net",
        "attention_output_gate": True,
        "linear_attention_freq": [int(kind == "linear_attention") for kind in c.layer_types],
        "linear_conv_kernel_dim": c.linear_conv_kernel_dim,
        "linear_key_head_dim": c.linear_key_head_dim,
        "linear_value_head_dim": c.linear_value_head_dim,
        "linear_num_key_heads": c.linear_num_key_heads,
        "linear_num_value_heads": c.linear_num_value_heads,
    }


def latent_fields(c: PreTrainedConfig) -> dict[str, Any]:
    """The fields of MLATransformerConfig (transformer/transformer_config.py:2006), YaRN's without their prefix."""
    yarn = {name.removeprefix("yarn_"): value for name, value in yarn_fields(c).items()}
    if not yarn.pop("correction_range_round_to_int", True):
        raise JudgementError("latents have no YaRN without truncation")
    return {
        "multi_latent_attention": True,
        "q_lora_rank": c.q_lora_rank,
        "kv_lora_rank": c.kv_lora_rank,
        "qk_head_dim": c.qk_nope_head_dim,
        "qk_pos_emb_head_dim": c.qk_rope_head_dim,
        "v_head_dim": c.v_head_dim,
        "rope_type": "yarn" if yarn else "rope",
        "rotary_base": float(c.rope_parameters["rope_theta"]),
        **yarn,
    }


def gpt_oss_fields(c: PreTrainedConfig) -> dict[str, Any]:
    """Sinks, and the activation of its experts: up has 1 added, and both are clamped (transformer/mlp.py:218)."""
    if c.swiglu_alpha != 1.702:
        raise JudgementError(f"quick_gelu has no gain of {c.swiglu_alpha}")
    return {
        "softmax_type": "learnable",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": c.swiglu_limit,
    }


def expert_fields(c: PreTrainedConfig) -> dict[str, Any]:
    """The router and the experts as TransformerConfig's fields, empty without any.

    What transformers normalizes after a softmax is a softmax over the chosen (transformer/moe/moe_utils.py
    `topk_routing_with_score_function`); a sigmoid's weights are always normalized.
    """
    if not has_experts(c):
        return {}
    if c.model_type in STATE:
        return {
            "num_moe_experts": c.n_routed_experts,
            "moe_router_topk": c.num_experts_per_tok,
            "moe_ffn_hidden_size": c.moe_intermediate_size,
            "moe_shared_expert_intermediate_size": c.moe_shared_expert_intermediate_size,
            "moe_latent_size": c.moe_latent_size,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": c.routed_scaling_factor if c.routed_scaling_factor != 1.0 else None,
        }
    sigmoid, first = c.model_type in SIGMOID, c.model_type in (*LATENT, "dots1", "glm4_moe")
    alike = c.model_type in ("mixtral", "gpt_oss")
    normalized = alike or getattr(c, "norm_topk_prob", True)
    sparse = [1] * c.num_hidden_layers
    if c.model_type in ("glm4_moe_lite", "hy_v3"):
        sparse = [int(kind == "sparse") for kind in c.mlp_layer_types]
    elif first:
        sparse = [int(layer >= c.first_k_dense_replace) for layer in range(c.num_hidden_layers)]
    elif not (alike or sigmoid or c.model_type == "qwen3_5_moe_text"):
        step = c.decoder_sparse_step
        sparse = [int(n not in c.mlp_only_layers and (n + 1) % step == 0) for n in range(c.num_hidden_layers)]
    hunyuan, shares = c.model_type == "hy_v3", first or sigmoid
    count = c.num_shared_experts if hunyuan else getattr(c, "n_shared_experts", None)
    shared = c.moe_intermediate_size * count if shares else None
    scale = c.router_scaling_factor if hunyuan else getattr(c, "routed_scaling_factor", 1.0)
    grouped = (getattr(c, "n_group", None) or 1) > 1 and (sigmoid or c.topk_method == "group_limited_greedy")
    return {
        "num_moe_experts": c.num_experts
        if c.model_type in ("qwen2_moe", "deepseek_v2", *LINEAR)
        else c.num_local_experts,
        "moe_router_topk": c.num_experts_per_tok,
        "moe_ffn_hidden_size": c.intermediate_size if alike else c.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": getattr(c, "shared_expert_intermediate_size", shared)
        if shares or c.model_type in ("qwen2_moe", *LINEAR)
        else None,
        "moe_shared_expert_gate": c.model_type in ("qwen2_moe", *LINEAR),
        "moe_layer_freq": sparse if 0 in sparse else 1,
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_pre_softmax": not normalized,
        "moe_router_enable_expert_bias": sigmoid,
        "moe_router_topk_scaling_factor": scale if scale != 1.0 else None,
        "moe_router_num_groups": c.n_group if grouped else None,
        "moe_router_group_topk": c.topk_group if grouped else None,
    }


def transformer_config(c: PreTrainedConfig, topology: Topology, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's configuration of a Hugging Face model, with all kernel fusions off (the default)."""
    silu = quick_gelu if c.model_type == "gpt_oss" else torch.nn.functional.silu
    ungated = squared_relu if activation(c) == "relu2" else torch.nn.functional.gelu
    kind = MLATransformerConfig if c.model_type in LATENT else TransformerConfig
    config = kind(
        gated_linear_unit=activation(c) == "silu",
        activation_func=silu if activation(c) == "silu" else ungated,
        bias_activation_fusion=GELU.get(activation(c), False),
        use_cpu_initialization=True,
        deterministic_mode=c.model_type in LINEAR,
        params_dtype=dtype,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp,
        expert_model_parallel_size=topology.ep,
        expert_tensor_parallel_size=topology.etp or topology.tp,
        **({"moe_router_load_balancing_type": "none"} if has_experts(c) else {}),
        **({"use_mamba_mem_eff_path": False} if c.model_type in STATE else {}),
        **model_fields(c) | window_fields(c) | (latent_fields(c) if c.model_type in LATENT else {}),
        **topology.uneven,
    )
    vars(config).update({} if c.model_type in LATENT else yarn_fields(c))
    return config


def padded_vocabulary(c: PreTrainedConfig, topology: Topology, claims: argparse.Namespace) -> int:
    """Rows of the padded vocabulary; Megatron-LM pads to a multiple of make_vocab_size_divisible_by * TP."""
    unit = getattr(claims, "make_vocab_size_divisible_by", None)
    if unit is None:
        return getattr(claims, "padded_vocab_size", c.vocab_size)
    return -(-c.vocab_size // (unit * topology.tp)) * unit * topology.tp


def expected_claims(
    c: PreTrainedConfig, topology: Topology, dtype: torch.dtype, padded: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What args must say, and what args must say if they say anything."""
    rope = position_arguments(c)
    required = model_fields(c) | {
        **expert_claims(c, topology),
        **yarn_claims(c),
        **({"hybrid_override_pattern": pattern(c)} if c.model_type in STATE else {}),
        **{name: rope[name] for name in ("rotary_base", "rotary_percent", "position_embedding_type") if name in rope},
        "max_position_embeddings": c.max_position_embeddings,
        "untie_embeddings_and_output_weights": not c.tie_word_embeddings,
        "swiglu": activation(c) == "silu" and c.model_type != "gpt_oss",
        "quick_geglu": c.model_type == "gpt_oss",
        "squared_relu": activation(c) == "relu2",
        **({"bias_gelu_fusion": GELU[activation(c)]} if activation(c) in GELU else {}),
        "padded_vocab_size": padded,
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
    }
    required.pop("num_moe_experts", None)
    optional = {
        "add_bias_linear": required.pop("add_bias_linear"),
        "rotary_interleaved": False,
        "use_rope_scaling": "rope_scaling" in rope,
        "apply_layernorm_1p": required["layernorm_zero_centered_gamma"],
        "window_size": window_fields(c).get("window_size"),
        "decoder_first_pipeline_num_layers": topology.uneven["num_layers_in_first_pipeline_stage"],
        "decoder_last_pipeline_num_layers": topology.uneven["num_layers_in_last_pipeline_stage"],
        "params_dtype": dtype,
    }
    if "rope_scaling" in rope:
        optional["rope_scaling_factor"] = rope["rope_scaling_factor"]
    return required, optional


def expert_claims(c: PreTrainedConfig, topology: Topology) -> dict[str, Any]:
    """What args must say of experts under a name that is not TransformerConfig's."""
    if not has_experts(c):
        return {}
    sizes = {"expert_model_parallel_size": topology.ep, "expert_tensor_parallel_size": topology.etp}
    return {"num_experts": expert_fields(c)["num_moe_experts"], **sizes}


def claim_failures(claims: argparse.Namespace, required: dict[str, Any], optional: dict[str, Any]) -> list[str]:
    """One line per attribute of args that is absent or says something else."""
    arguments = dict(vars(claims))
    if arguments.get("group_query_attention") is False:  # Megatron-LM then ignores num_query_groups, 1 by default
        arguments["num_query_groups"] = arguments.get("num_attention_heads")
    if isinstance(arguments.get("window_size"), list):
        arguments["window_size"] = tuple(arguments["window_size"])
    wrong = {n: v for n, v in (required | optional).items() if n in arguments and arguments[n] != v}
    absent = [f"args.{n} is absent, expected {v!r}" for n, v in required.items() if n not in arguments]
    return absent + [f"args.{n} is {arguments[n]!r}, expected {v!r}" for n, v in wrong.items()]


def pattern(c: PreTrainedConfig) -> str:
    """The letter of each layer of a hybrid."""
    return "".join(LETTERS[kind] for kind in c.layers_block_type)


def layer_spec(config: TransformerConfig, stage: int | None) -> Any:
    """The local layers of a chunk; dense ones and those with experts may alternate. Linear attention has none."""
    if config.experimental_attention_variant:
        return get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=stage)
    if config.num_moe_experts is None:
        return get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
        )
    return get_gpt_decoder_block_spec(config, False, normalization=config.normalization, vp_stage=stage)


def build_chunks(c: PreTrainedConfig, config: TransformerConfig, padded: int) -> list[GPTModel]:
    """This rank's real GPTModels, one per virtual chunk (models/gpt/gpt_model.py:88), in the file's dtype.

    The local spec makes its norms in float32 whatever params_dtype says (transformer/torch_norm.py), so all
    is cast afterwards, as the framework does by Float16Module (transformer/module.py:440).
    """
    vpp = config.virtual_pipeline_model_parallel_size
    if config.is_hybrid_model:
        from megatron.core.models.mamba import MambaModel

        return [
            MambaModel(
                config,
                te_layers.hybrid(),
                padded,
                c.max_position_embeddings,
                pre_process=ps.is_pipeline_first_stage(),
                hybrid_override_pattern=pattern(c),
                post_process=ps.is_pipeline_last_stage(),
                parallel_output=False,
                share_embeddings_and_output_weights=c.tie_word_embeddings,
                **position_arguments(c),
            ).to(config.params_dtype)
        ]
    return [
        GPTModel(
            config=config,
            transformer_layer_spec=layer_spec(config, stage),
            vocab_size=padded,
            max_sequence_length=c.max_position_embeddings,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            parallel_output=False,
            share_embeddings_and_output_weights=c.tie_word_embeddings,
            vp_stage=stage,
            **position_arguments(c),
        ).to(config.params_dtype)
        for stage in ([None] if vpp is None else range(vpp))
    ]


def from_te_names(state: StateDict, config: TransformerConfig) -> StateDict:
    """Rename the norms of a Transformer Engine checkpoint to the local spec's names.

    The pairs are megatron-core's own: sharded_state_dict_keys_map, models/gpt/gpt_layer_specs.py:417.
    """
    pairs = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.sharded_state_dict_keys_map
    if any(".linear_kv_down_proj." in key for key in state):
        pairs = LATENT_NORMS | {name: te for name, te in pairs.items() if name != "input_layernorm."}
    sparse = {key.split(".mlp.")[0] for key in state if ".mlp.router." in key}
    stand_ins = config.experimental_attention_variant or config.is_hybrid_model  # whose layers have these names here
    renamed, pairs = {}, {} if stand_ins else pairs
    for old, value in state.items():
        key = re.sub(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".experts.local_experts.\3.\1.\2", old)
        for local, te in pairs.items():
            if key.split(".pre_mlp_layernorm.")[0] in sparse:  # in Transformer Engine too, before experts
                continue
            if re.search(rf"layers\.\d+\.{re.escape(local)}", key):
                raise JudgementError(f"{key} is a local name, --norm te expects {te}*")
            key = re.sub(rf"(layers\.\d+\.(?:transformer_layer\.)?){re.escape(te)}", rf"\g<1>{local}", key)
        renamed[key] = local_part(value) if "_down_proj." in key else value
    return renamed


LATENT_NORMS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""The norms of latents, local and in Transformer Engine (models/gpt/gpt_layer_specs.py:235 and :380)."""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a projection that Transformer Engine has on every rank, and the local layers cut."""
    return tensor.chunk(ps.get_tensor_model_parallel_world_size())[ps.get_tensor_model_parallel_rank()]


def gathered(part: torch.Tensor) -> torch.Tensor:
    """The other way around."""
    parts = [torch.empty_like(part) for _ in range(ps.get_tensor_model_parallel_world_size())]
    dist.all_gather(parts, part.contiguous(), group=ps.get_tensor_model_parallel_group())
    return torch.cat(parts)


def load_chunks(chunks: list[GPTModel], stored: dict[str, Any], names: list[str], norm: str) -> list[str]:
    """Load every chunk with strict=True; the model must then hold each tensor bit for bit, in its dtype."""
    present = [key for key in stored if re.fullmatch(r"model\d*", key)]
    if set(present) != set(names):
        return [f"the file holds {present}, expected {names}"]
    failures = []
    for chunk, name in zip(chunks, names, strict=True):
        try:
            state = from_te_names(stored[name], chunk.config) if norm == "te" else dict(stored[name])
            chunk.load_state_dict(state, strict=True)
        except (JudgementError, RuntimeError) as error:
            failures.append(f"{name}: {error}")
            continue
        failures += [f"{name}: {line}" for line in order_failures(chunk, state, norm)]
        loaded = chunk.state_dict()
        failures += [
            f"{name}: {key} changes when loaded ({value.dtype} becomes {loaded[key].dtype})"
            for key, value in state.items()
            if isinstance(loaded[key], torch.Tensor)
            and (loaded[key].dtype != value.dtype or not torch.equal(loaded[key], value))
        ]
    return failures


def order_failures(chunk: GPTModel, state: dict[str, Any], norm: str) -> list[str]:
    """Parameters stand in the order of the model: an optimizer numbers them so.

    Of Transformer Engine's names only matrices that are no expert's can be compared: its modules hold the others.
    """
    order = [
        key for key, param in chunk.named_parameters() if norm == "local" or (param.ndim > 1 and ".experts." not in key)
    ]
    known = set(order)
    ours = [key for key in state if key in known]
    return [f"{key} stands where the model has {other}" for key, other in zip(ours, order, strict=True) if key != other]


def vocabulary_failures(stored: dict[str, Any], topology: Topology) -> list[str]:
    """args.padded_vocab_size against the rows that the file really has."""
    lines = []
    for name in topology.chunks():
        for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            rows = len(stored.get(name, {}).get(key, ())) * topology.tp
            if rows and rows != getattr(stored["args"], "padded_vocab_size", None):
                lines.append(f"args.padded_vocab_size is not the {rows} rows of {key}")
    return lines


def save_real(out: Path, chunks: list[GPTModel], topology: Topology, claims: argparse.Namespace) -> None:
    """Write what the real model holds, as the framework would (state_dict_for_save_checkpoint, module.py:44).

    The norms have the local spec's names, also after --norm te; the down projections of latents are whole.
    """
    folder = out / "iter_0000007" / topology.folder(*my_ranks())
    folder.mkdir(parents=True, exist_ok=True)
    states = [chunk.state_dict_for_save_checkpoint() for chunk in chunks]
    for state in states:
        state.update({key: gathered(state[key]) for key in state if key.endswith("_down_proj.weight")})
    content = {"args": claims, "checkpoint_version": 3.0, "iteration": 7}
    if ps.get_expert_data_parallel_rank() == 0:  # megatron/training/checkpointing.py `save_checkpoint`
        torch.save(content | dict(zip(topology.chunks(), states, strict=True)), folder / FILE)
    dist.barrier()
    if dist.get_rank() == 0:
        (out / "latest_checkpointed_iteration.txt").write_text("7")


def token_ids(c: PreTrainedConfig) -> torch.Tensor:
    """Two random sequences, longer than the sliding window where there is a small one."""
    window = window_fields(c).get("window_size", (0, 0))[0] + 1
    length = window + 16 if window <= 512 else 17
    return torch.randint(0, c.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


def pipeline_forward(chunks: list[GPTModel], ids: torch.Tensor) -> torch.Tensor | None:
    """Chunk 0 through all stages, then chunk 1, ...; logits on the last stage, None elsewhere.

    Without a mask megatron-core makes its own, causal or windowed: fusions/fused_softmax.py:321-327.
    Between stages travel hidden states [sequence, batch, hidden].
    """
    positions = torch.arange(ids.shape[1])[None].expand_as(ids)
    y = None
    for chunk in chunks:
        if not chunk.pre_process:
            x = torch.empty(ids.shape[1], ids.shape[0], chunk.config.hidden_size)
            dist.recv(x, src=ps.get_pipeline_model_parallel_prev_rank())
            chunk.set_input_tensor(x)
        with CpuForCuda():
            y = chunk(ids, positions, None)
        if not chunk.post_process:
            dist.send(y.contiguous(), dst=ps.get_pipeline_model_parallel_next_rank())
            y = None
    return y


def hugging_face_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """The logits of transformers in float32 with eager attention; incomplete folders are refused."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if faults := {name: list(keys) for name, keys in info.items() if keys}:
        raise JudgementError(f"{folder} does not load cleanly: {faults}")
    return model.eval()(ids).logits


def compare_logits(ours: torch.Tensor, theirs: torch.Tensor, atol: float) -> list[str]:
    """Print the difference on the true vocabulary; a failure when it is more than atol or not a number."""
    difference = (ours[..., : theirs.shape[-1]] - theirs).abs().max().item()
    print(f"max abs logit difference {difference:.3g} of max {theirs.abs().max().item():.3g}", flush=True)
    return [] if difference <= atol else [f"logit difference {difference:.3g} > {atol:g}"]


def agree(failures: list[str]) -> None:
    """Collect every rank's failures; all ranks end when any has one, so that none waits for another."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, failures)
    lines = [f"rank {rank}: {line}" for rank, rank_lines in enumerate(gathered) for line in rank_lines]
    if lines and dist.get_rank() == 0:
        print("FAILED", *lines, sep="\n", file=sys.stderr, flush=True)
    dist.barrier()  # torchrun ends the others as soon as one ends: rank 0 must have printed
    if lines:
        sys.exit(1)


def my_ranks() -> tuple[int, int, int]:
    """Tensor, pipeline and expert rank of this process."""
    expert = ps.get_expert_model_parallel_rank()
    return ps.get_tensor_model_parallel_rank(), ps.get_pipeline_model_parallel_rank(), expert


def start_groups(topology: Topology) -> None:
    """megatron-core's process groups, none of which waits longer than a minute."""
    if dist.get_world_size() != topology.ranks:
        raise JudgementError(f"{dist.get_world_size()} processes for {topology}")
    ps.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp,
        expert_model_parallel_size=topology.ep,
        expert_tensor_parallel_size=topology.etp,
        distributed_timeout_minutes=1,
    )


@torch.no_grad()
def judge(megatron: Path, hf: Path, save: Path | None, options: argparse.Namespace) -> None:
    """Everything above in order; ends every rank when anything is wrong."""
    folder = iteration_folder(megatron)
    files = sorted(folder.glob(f"mp_rank_*/{FILE}"))
    if not files:
        raise JudgementError(f"no mp_rank_*/{FILE} in {folder}")
    topology = Topology.read(load_file(files[0].parent)["args"], options)
    c = AutoConfig.from_pretrained(hf)
    start_groups(topology)
    check_folders(folder, topology)
    stored = load_file(folder / topology.folder(*my_ranks()))
    tensors = [t for name in topology.chunks() for t in stored.get(name, {}).values()]
    dtype = next((t.dtype for t in tensors if isinstance(t, torch.Tensor)), torch.float32)
    padded = padded_vocabulary(c, topology, stored["args"])
    failures = claim_failures(stored["args"], *expected_claims(c, topology, dtype, padded))
    failures += vocabulary_failures(stored, topology)
    chunks = build_chunks(c, transformer_config(c, topology, dtype), padded)
    agree(failures + load_chunks(chunks, stored, topology.chunks(), options.norm))
    if save:
        save_real(save, chunks, topology, stored["args"])
    ids, failures = token_ids(c), []
    logits = pipeline_forward([chunk.float().eval() for chunk in chunks], ids)
    if logits is not None and ps.get_tensor_model_parallel_rank() == ps.get_data_parallel_rank() == 0:
        failures = compare_logits(logits, hugging_face_logits(hf, ids), options.atol)
    agree(failures)
    ps.destroy_model_parallel()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", nargs="+", help="MEGATRON=HF: a run root or iter_*/release folder, and its model")
    for name in ("tp", "pp", "vpp", "first", "last"):
        parser.add_argument(f"--{name}", type=int, help="default: what the file's args say")
    parser.add_argument("--norm", choices=("local", "te"), default="local", help="the file's norm names")
    parser.add_argument("--save", type=Path, help="write back what the real models hold, into OUT/0, OUT/1, ...")
    parser.add_argument("--atol", type=float, default=1e-4)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds until the process ends itself")
    return parser.parse_args()


def main() -> int:
    """Exit status 0 when the checkpoints agree, 1 when not."""
    options = parse()
    faulthandler.dump_traceback_later(options.limit, exit=True)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    patch_for_cpu()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        for number, pair in enumerate(options.pairs):
            megatron, _, hf = pair.partition("=")
            if dist.get_rank() == 0:
                print(f"{megatron} against {hf}", flush=True)
            judge(Path(megatron), Path(hf), options.save / str(number) if options.save else None, options)
    except JudgementError as error:
        print(f"FAILED\nrank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
        return 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
