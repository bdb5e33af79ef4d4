"""What Megatron-Bridge and NeMo 2 save instead of the args of Megatron-LM: the fields of a model's class, as YAML.

    iter_0000100/run_config.yaml, `model`       Megatron-Bridge: a provider, which is a TransformerConfig with more
    context/model.yaml, `config`                NeMo 2: a GPTConfig, likewise; beside `weights/`

Fields have the names of megatron-core, most of which are arguments of Megatron-LM too; what is called otherwise is
below. Both build megatron-core's GPTModel of the fields alone where their class is one of `PLAIN`; other classes
change the model in code, which no field tells: those of Bridge that are known are in `providers.py`.

Facts: Megatron-Bridge 0.3.1 models/gpt_provider.py, whose own files are in tests/golden/bridge; NeMo 2.5
collections/llm/gpt/model/base.py, llama.py (`apply_rope_scaling`), and its tests/lightning/_io/artifacts/model.yaml.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from formats.errors import RefusedError, SourceError, UnsupportedError, short
from formats.megatron.args import providers, vision
from formats.megatron.args.moe import INTERLEAVE
from formats.megatron.args.options import Options
from formats.megatron.args.provider import TARGET, Provider
from formats.megatron.args.vision import Vision
from formats.model.spec import ModelSpec
from formats.torch_files.archive_writer import NUMBERS, Small, packed_plain
from formats.torch_files.pickle_values import Namespace

BRIDGE, NEMO = "run_config.yaml", "model.yaml"
MOST_YAML = 1 << 20
PLAIN = re.compile(
    r"megatron\.bridge\.models\.(gpt_provider\.GPTModelProvider|mla_provider\.MLAModelProvider|(llama|qwen|mistral)\.\w+\."
    r"(Llama(?!4)|Qwen2(?!\w*VL)|Qwen25(?!\w*VL)|Qwen3(?!\w*(VL|Next))|Mistral)\w*Provider\w*)"
    r"|nemo\.collections\.llm\.gpt\.model\.(base\.GPTConfig|llama\.Llama(?!4)|mistral\.Mistral|mixtral\.Mixtral|qwen2\.Qwen2|"
    r"qwen3\.Qwen3)\w*"
)
"""Classes whose model is what their fields say, with the name of the module."""
LAYERS = "transformer_layer_spec"
"""The field that names the function which builds a layer."""
BUILDERS: Mapping[str, Collection[str]] = {
    **{
        f"{module}.{name}_layer_spec": ()
        for module in ("megatron.bridge.models.gpt_provider", "nemo.collections.llm.gpt.model.base")
        for name in ("default", "local", "transformer_engine", "transformer_engine_full")
    },
    "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec": ("use_transformer_engine",),
}
"""Functions that build layers of what the other fields say: the arguments they may be given, which choose kernels.

The same files, and Megatron-Bridge 0.2 to 0.6 models/: the last one is that of a model with latents.
"""
RENAMED = {
    "num_moe_experts": "num_experts",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "vocab_size": "true_vocab_size",
}
"""Field: the argument that says the same."""
OWN = {
    "_cpu_offloading_context", TARGET, "activation_func", "data_step_fn", "first_pipeline_num_layers",
    "forward_step_fn", "gated_linear_unit", "generation_config", "hf_model_id", "last_pipeline_num_layers",
    "mtp_enabled", "parallel_output", "scatter_embedding_sequence_parallel", "share_embeddings_and_output_weights",
    "should_pad_vocab", LAYERS, "use_arbitrary_attention_mask", "use_transformer_engine_full_layer_spec",
}  # fmt: skip
"""Fields that are no arguments: they choose kernels, or are read here."""
WRITTEN = """
    add_bias_linear add_qkv_bias attention_dropout bf16 ffn_hidden_size fp16 hidden_dropout hidden_size kv_channels
    layernorm_epsilon layernorm_zero_centered_gamma make_vocab_size_divisible_by moe_ffn_hidden_size moe_grouped_gemm
    moe_layer_freq moe_router_enable_expert_bias moe_router_group_topk moe_router_load_balancing_type
    moe_router_num_groups moe_router_pre_softmax moe_router_score_function moe_router_topk
    moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_intermediate_size no_rope_freq normalization
    num_attention_heads num_layers num_moe_experts num_query_groups pipeline_model_parallel_size
    position_embedding_type qk_layernorm rope_scaling rope_scaling_factor rotary_base rotary_percent
    seq_len_interpolation_factor tensor_model_parallel_size vocab_size window_attn_skip_freq window_size
"""
"""The fields of Bridge's GPTModelProvider that an argument says, and that another model has otherwise."""
SINGLE = {
    "experimental_attention_variant": None, "mtp_num_layers": None, "multi_latent_attention": False,
    "softmax_type": "vanilla", **dict.fromkeys(INTERLEAVE.values()),
}  # fmt: skip
"""Argument: the one value with which a GPTModelProvider of those fields computes the model."""
TRAINING = {"step": "I32", "consumed_train_samples": "I32", "skipped_train_samples": "I32",
            "consumed_valid_samples": "I32", "floating_point_operations_so_far": "F64"}  # fmt: skip
"""What `train_state.pt` counts, and in which type (training/state.py `TrainState`)."""
ACTIVATIONS = {
    ("silu", True): {"swiglu": True},
    ("gelu", False): {},
    ("squared_relu", False): {"squared_relu": True},
    ("quick_gelu", True): {"quick_geglu": True},
}
"""(function, whether there is a gate): the arguments that say so."""
FUNCTIONS = {
    "silu": "torch.nn.functional.silu",
    "gelu": "torch.nn.functional.gelu",
    "squared_relu": "megatron.core.activations.squared_relu",
    "quick_gelu": "megatron.core.activations.quick_gelu",
}
"""The names that Python finds them under."""
LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}
"""What NeMo says of the scaling of Llama 3.1 beside its factor, and megatron-core has no other."""


def place(run: Path, folder: Path) -> Path | None:
    """The file that is instead of the args, None if there is none."""
    candidates = (folder / BRIDGE, run / "context" / NEMO)
    return next((path for path in candidates if path.is_file()), None)


def read(path: Path, *, adapter: bool = False) -> Namespace:
    """The fields of a model's class as the args of Megatron-LM, and those of a class of `providers.py` as they are.

    Args:
        path: the file.
        adapter: whether they are of the base of an adapter.

    Raises:
        SourceError: the file is no map of fields.
        UnsupportedError: the class changes its model in code, its activation is none of Megatron-LM's, or there is an
            adapter alone.
        RefusedError: the rotary embedding is scaled as Megatron-LM cannot say.
    """
    fields, peft = _held(path)
    if peft and not adapter:
        raise UnsupportedError(
            f"{path} says peft: the checkpoint holds an adapter of Megatron-Bridge without its base",
            "--adapter only makes a folder of PEFT of it, and `convert merge` puts that into its base",
        )
    own, whole = providers.of_fields(fields, str(path)), vision.of_fields(fields)
    if adapter:
        providers.require_no_adapter(own[0] if own else None, str(path))
    if whole:
        if adapter:
            raise UnsupportedError(f"{path}: an adapter of a {whole.kind} in Megatron-Bridge is not read")
        return Namespace(_said(vision.of_text(whole, fields, str(path)), path))
    return Namespace(_with_own(fields, *own) if own else _as_args(fields, path))


def read_vision(path: Path) -> tuple[Vision, dict[str, Any]] | None:
    """The class with a tower that a file names, and its fields; None if it is none."""
    fields, _ = _held(path)
    whole = vision.of_fields(fields)
    return None if whole is None else (whole, fields)


def adapter(path: Path) -> dict[str, Any]:
    """The fields of an adapter's class; none where the file does not say them."""
    return _held(path)[1] if path.name == BRIDGE else {}


def _held(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the model's class, and of the adapter's."""
    try:
        if path.stat().st_size > MOST_YAML:
            raise SourceError(f"{path} has {path.stat().st_size} bytes, too many for a configuration")
        document = yaml.load(path.read_text(), Loader=_Loader)  # noqa: S506
        return dict(document["model" if path.name == BRIDGE else "config"]), dict(document.get("peft") or {})
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError, TypeError, KeyError, AttributeError):
        raise SourceError(f"{path} holds no fields of a model") from None


def _with_own(fields: Mapping[str, Any], provider: Provider, known: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a class, with its defaults, and all others as args."""
    others = _renamed({name: value for name, value in fields.items() if name not in provider.names})
    return {**others, **{name: known[name] for name in (TARGET, *provider.names) if name in known}}


def _renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are arguments, by what these are called."""
    known = {name: value for name, value in fields.items() if name not in {*OWN, *LLAMA3, "scale_factor"}}
    return {RENAMED.get(name, name): value for name, value in known.items() if not isinstance(value, dict)}


def _as_args(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    kind = str(fields.get(TARGET))
    if not PLAIN.fullmatch(kind):
        raise UnsupportedError(
            f"{path}: the class {short(kind)} is not known to compute what its fields say",
            "export it with the program that wrote it: AutoBridge.export_ckpt, or llm.export_ckpt of NeMo",
        )
    return _said(fields, path)


def _said(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The arguments that the fields of a GPTModelProvider are."""
    function = str((fields.get("activation_func") or {}).get("_target_")).rpartition(".")[2]
    gated = fields.get("gated_linear_unit")
    activation = ACTIVATIONS.get((function, gated is True))
    if activation is None:
        raise UnsupportedError(f"{path}: activation_func = {short(function)} with gated_linear_unit = {short(gated)}")
    length, groups = fields.get("seq_length"), fields.get("num_query_groups")
    return {
        "max_position_embeddings": length,
        "swiglu": False,
        "quick_geglu": False,
        "squared_relu": False,
        **_renamed(fields),
        **activation,
        "bias_gelu_fusion": function == "gelu" and fields.get("bias_activation_fusion") is True,
        "untie_embeddings_and_output_weights": fields.get("share_embeddings_and_output_weights") is False,
        "group_query_attention": groups is not None,
        "disable_bias_linear": fields.get("add_bias_linear") is False,
        "apply_layernorm_1p": fields.get("layernorm_zero_centered_gamma") is True,
        **_llama3(fields, path),
        **_unknown_layers(fields.get(LAYERS)),
    }


def _unknown_layers(builder: Any) -> dict[str, Any]:
    """The field of a function that builds layers, where it is none of `BUILDERS`: no argument, so that it is refused.

    Args:
        builder: a function, or one with arguments (`functools.partial`), as utils/yaml_utils.py of Megatron-Bridge
            writes both.
    """
    if builder is None:
        return {}
    about = builder if isinstance(builder, dict) else {TARGET: builder}
    name = str(about.get(TARGET))
    given = [key for key, value in about.items() if key not in (TARGET, "_call_", "_partial_") and value != []]
    odd = [key for key in given if key not in BUILDERS.get(name, given)]
    return {} if name in BUILDERS and not odd else {LAYERS: f"{name}({', '.join(odd)})" if odd else name}


def _llama3(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The scaling of a NeMo class of Llama 3.1 and later."""
    if fields.get("scale_factor") is None:
        return {}
    for name, only in LLAMA3.items():
        if fields.get(name) != only:
            raise RefusedError(f"{path}: {name} = {short(fields.get(name))}, and megatron-core has {only} alone")
    return {"use_rope_scaling": True, "rope_scaling_factor": fields["scale_factor"]}


def written(
    args: Mapping[str, Any],
    iteration: int,
    sections: Mapping[str, Any] | None = None,
    further: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """The files that Megatron-Bridge expects beside the weights, by what it calls them.

    `sections` are further ones of the configuration, `further` fields those of a class with a tower.

    Raises:
        RefusedError: its GPTModelProvider does not compute the model.
    """
    shape = {name: args.get(name) for name in ("swiglu", "quick_geglu", "squared_relu") if args.get(name)}
    kinds = [kind for kind, arguments in ACTIVATIONS.items() if arguments == shape]
    odd = [name for name, only in SINGLE.items() if args.get(name) not in (None, only)]
    odd += [] if args.get("position_embedding_type") in ("rope", "learned_absolute") else ["position_embedding_type"]
    odd += [] if kinds else [*shape]
    if odd:
        raise RefusedError(
            f"what Megatron-Bridge computes with {odd[0]} = {short(args.get(odd[0]))} is not known here",
            "leave --for bridge out, and import the Hugging Face folder with AutoBridge.import_ckpt",
        )
    function, gated = kinds[0]
    model = {
        TARGET: "megatron.bridge.models.gpt_provider.GPTModelProvider",
        **{name: args[RENAMED.get(name, name)] for name in WRITTEN.split() if RENAMED.get(name, name) in args},
        "activation_func": {TARGET: FUNCTIONS[function], "_call_": False},
        "gated_linear_unit": gated,
        "params_dtype": _torch(args["params_dtype"].name),
        "seq_length": args["max_position_embeddings"],
        "share_embeddings_and_output_weights": not args["untie_embeddings_and_output_weights"],
        "should_pad_vocab": True,
    }
    model |= {"bias_activation_fusion": args["bias_gelu_fusion"]} if function == "gelu" else {}
    return _files({**model, **(further or {})}, iteration, args.get("consumed_train_samples") or 0, sections or {})


def written_of(
    provider: Provider,
    spec: ModelSpec,
    args: Mapping[str, Any],
    options: Options,
    dtype: str,
    iteration: int,
    further: Mapping[str, Any],
) -> dict[str, bytes]:
    """The same for a class of `providers.py`.

    Args:
        provider: the class.
        spec: the model.
        args: those of the source that are of the training: dropouts, and how much was consumed.
        options: the topology, and what the user accepted.
        dtype: what torch calls the element type.
        iteration: that of the folder.
        further: fields of a class with a tower.

    Raises:
        RefusedError: the class does not compute the model.
    """
    model = {
        **provider.fields_of(spec, options.accepted),
        "tensor_model_parallel_size": options.tp,
        "pipeline_model_parallel_size": options.pp,
        **{name: args.get(name, 0.0) for name in ("attention_dropout", "hidden_dropout")},
        **{name: _torch(dtype) for name in ("params_dtype", "autocast_dtype")},
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        **further,
    }
    return _files(model, iteration, args.get("consumed_train_samples") or 0, {})


def _torch(name: str) -> dict[str, Any]:
    """An object of torch, as Bridge's files name it."""
    return {TARGET: f"torch.{name}", "_call_": False}


def _files(model: Mapping[str, Any], iteration: int, samples: int, sections: Mapping[str, Any]) -> dict[str, bytes]:
    """The files, of a model's fields.

    `checkpoint` says what its loader asks for (training/checkpointing.py `_load_checkpoint_from_path`).
    """
    checkpoint = {
        TARGET: "megatron.bridge.training.config.CheckpointConfig",
        "ckpt_format": "torch_dist",
        **dict.fromkeys(("save_optim", "save_rng", "fully_parallel_save"), False),
    }
    run = {
        TARGET: "megatron.bridge.training.config.ConfigContainer",
        "model": model,
        "checkpoint": checkpoint,
        **sections,
    }
    counted = {"step": iteration, "consumed_train_samples": samples}
    state = {name: Small(kind, (), struct.pack(NUMBERS[kind], counted.get(name, 0))) for name, kind in TRAINING.items()}
    state |= {name: Small("BOOL", (), b"\0") for name in ("do_train", "do_valid", "do_test")}
    packed = packed_plain(state)
    return {BRIDGE: yaml.safe_dump(run).encode(), "train_state.pt": packed, "latest_train_state.pt": packed}


class _Loader(yaml.SafeLoader):
    """YAML without objects: what PyYAML would make one of is the list or map that it is."""


def _plain(loader: yaml.SafeLoader, _: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    return loader.construct_sequence(node, deep=True) if isinstance(node, yaml.SequenceNode) else str(node.value)


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", _plain)
