"""The configuration that Megatron-Bridge and NeMo 2 save instead of Megatron-LM's args: a model class's fields in YAML.

    iter_0000100/run_config.yaml, `model`       Megatron-Bridge: a provider, a TransformerConfig with further fields
    context/model.yaml, `config`                NeMo 2: a GPTConfig, likewise; beside `weights/`

Fields have the names of megatron-core, most of which are arguments of Megatron-LM too; other names are in `RENAMED`.
Both programs build megatron-core's GPTModel from the fields alone if the class is one of `PLAIN`; other classes change
the model in code, which the fields do not record: those of Bridge that are known are in `providers.py`.

Facts: Megatron-Bridge 0.3.1 models/gpt_provider.py, whose own files are in tests/golden/bridge; NeMo 2.5
collections/llm/gpt/model/base.py, llama.py (`apply_rope_scaling`), and its tests/lightning/_io/artifacts/model.yaml.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from formats.errors import RefusedError, SourceError, UnsupportedError, short
from formats.megatron.args import builders, class_defaults, providers, vision, visions
from formats.megatron.args.fields import FIELDS, LAYERS
from formats.megatron.args.moe import INTERLEAVE
from formats.megatron.args.options import Options
from formats.megatron.args.provider import TARGET, Provider
from formats.megatron.args.rope import YARN, YARN_FIELDS
from formats.megatron.args.run_options import RUN
from formats.megatron.args.vision import Vision
from formats.model.spec import ModelSpec
from formats.model.values import positive_int as natural
from formats.torch_files.archive_writer import NUMBERS, Small, packed_plain
from formats.torch_files.pickle_values import Namespace

BRIDGE, NEMO = "run_config.yaml", "model.yaml"
MOST_YAML = 1 << 20
PLAIN = re.compile(
    r"megatron\.bridge\.models\.(gpt_provider\.GPTModelProvider|mla_provider\.MLAModelProvider|(llama|qwen|mistral)\.\w+\."
    r"(Llama(?!4|3[3-9])|Qwen2(?!\w*VL)|Qwen25(?!\w*VL)|Qwen3(?!\w*(VL|Next))|Mistral)\w*Provider\w*)"
    r"|nemo\.collections\.llm\.gpt\.model\.(base\.GPTConfig|llama\.(Code)?Llama(?!4|3[3-9])|mistral\.Mistral|"
    r"mixtral\.Mixtral|qwen2\.Qwen2|qwen3\.Qwen3)\w*"
)
"""Classes, with their modules, whose fields alone determine the model."""
RENAMED = {
    "num_moe_experts": "num_experts",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "vocab_size": "true_vocab_size",
}
"""The argument of Megatron-LM with the same meaning, by field."""
OWN = {
    "_cpu_offloading_context", TARGET, "activation_func", "bias_dropout_add_fusion", "data_step_fn",
    "first_pipeline_num_layers", "forward_step_fn", "gated_linear_unit", "generation_config", "hf_model_id",
    "hf_model_revision", "last_pipeline_num_layers",
    "mtp_enabled", "parallel_output", "scatter_embedding_sequence_parallel", "share_embeddings_and_output_weights",
    "should_pad_vocab", LAYERS, "use_arbitrary_attention_mask", "use_transformer_engine_full_layer_spec",
}  # fmt: skip
"""Fields that have no argument: they choose kernels, are read in this file, or are read by nothing, such as
`bias_dropout_add_fusion` of NeMo's GPTConfig126M (base.py), which megatron-core calls `bias_dropout_fusion`."""
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
"""The fields of Bridge's GPTModelProvider that have an argument, and that differ between models."""
SINGLE = {
    "experimental_attention_variant": None, "mtp_num_layers": None, "multi_latent_attention": False,
    "softmax_type": "vanilla", **dict.fromkeys(INTERLEAVE.values()),
}  # fmt: skip
"""By argument: the only value with which a GPTModelProvider of the fields `WRITTEN` computes the model."""
TRAINING = {"step": "I32", "consumed_train_samples": "I32", "skipped_train_samples": "I32",
            "consumed_valid_samples": "I32", "floating_point_operations_so_far": "F64"}  # fmt: skip
"""The counters in `train_state.pt`, and their element types (training/state.py `TrainState`)."""
ACTIVATIONS = {
    ("silu", True): {"swiglu": True},
    ("gelu", False): {},
    ("squared_relu", False): {"squared_relu": True},
    ("quick_gelu", True): {"quick_geglu": True},
}
"""The arguments by (activation function, whether the MLP has a gate)."""
FUNCTIONS = {
    "silu": ("torch.nn.functional.silu",),
    "gelu": ("torch.nn.functional.gelu", "torch._C._nn.gelu"),
    "squared_relu": (
        "megatron.core.activations.squared_relu", "nemo.collections.llm.fn.activation.squared_relu",
        "nemo.collections.nlp.modules.common.megatron.utils.squared_relu",
    ),
    "quick_gelu": ("megatron.core.activations.quick_gelu", "megatron.core.fusions.fused_bias_geglu.quick_gelu"),
}  # fmt: skip
"""The import paths of each activation function; the first is written.

The files write the `__module__` of a function, which of torch's gelu is `torch._C._nn`. megatron-core 0.16 and 0.19
activations.py, fusions/fused_bias_geglu.py; NeMo 2 collections/llm/fn/activation.py, and the other path of its releases
before that file (llm/gpt/model/nemotron.py).
"""
NAMED = {path: function for function, paths in FUNCTIONS.items() for path in paths}


@dataclass(frozen=True)
class RunConfig:
    """The parsed file.

    Attributes:
        path: the file.
        fields: the fields of the model's class.
        adapter: the fields of the adapter's class; empty if there is no adapter.
    """

    path: Path
    fields: Mapping[str, Any]
    adapter: Mapping[str, Any]


def place(run: Path, folder: Path) -> Path | None:
    """The file with the configuration; None if there is none."""
    candidates = (folder / BRIDGE, run / "context" / NEMO)
    return next((path for path in candidates if path.is_file()), None)


def load(path: Path) -> RunConfig:
    """Parse the file.

    Raises:
        SourceError: the file is too large, or holds no fields of a model.
    """
    document = _parsed(path)
    try:
        return RunConfig(path, dict(document[_section(path)]), dict(document.get("peft") or {}))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _no_fields(path) from None


def names_class(path: Path) -> bool:
    """Whether the file is of a model's class, and not another program's of the same name.

    Raises:
        SourceError: the file is too large, or no YAML.
    """
    document = _parsed(path)
    fields = document.get(_section(path)) if isinstance(document, dict) else None
    return isinstance(fields, dict) and TARGET in fields


def optimizer_options(path: Path) -> dict[str, Any]:
    """The options of the training's optimizer in the file, by name; those of its schedule among them.

    Raises:
        SourceError: the file is too large, or no YAML.
    """
    options: dict[str, Any] = {}
    document = _parsed(path)
    for keys in (("optimizer",), ("scheduler",)) if path.name == BRIDGE else (("optim",), ("optim", "config")):
        section = document
        for key in keys:
            section = section.get(key) if isinstance(section, dict) else None
        options |= section if isinstance(section, dict) else {}
    return options


def _parsed(path: Path) -> Any:
    if path.stat().st_size > MOST_YAML:
        raise SourceError(f"{path} has {path.stat().st_size} bytes, too many for a configuration")
    try:
        return yaml.load(path.read_text(), Loader=_Loader)  # noqa: S506
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError, TypeError, KeyError, AttributeError):
        raise _no_fields(path) from None


def _section(path: Path) -> str:
    """The key of the fields of a model's class."""
    return "model" if path.name == BRIDGE else "config"


def _no_fields(path: Path) -> SourceError:
    return SourceError(f"{path} holds no fields of a model")


def args_of(config: RunConfig, settings: Collection[str] = (), *, adapter: bool = False) -> Namespace:
    """The fields of a model's class as args of Megatron-LM; fields of a class of `providers.py` are kept as they are.

    Args:
        config: the parsed file.
        settings: the settings that the user passed, which overrule the file.
        adapter: whether to accept the configuration of an adapter, whose base the fields describe.

    Raises:
        UnsupportedError: the class changes its model in code, its activation is none of Megatron-LM's, or the
            checkpoint holds an adapter alone and `adapter` is false.
        RefusedError: the scaling of the rotary embedding is none of Megatron-LM's, or it or the router is in doubt.
    """
    path, fields = config.path, config.fields
    if config.adapter and not adapter:
        raise UnsupportedError(
            f"{path} says peft: the checkpoint holds an adapter of Megatron-Bridge without its base",
            "--adapter only makes a folder of PEFT of it, and `convert merge` puts that into its base",
        )
    whole = visions.of_fields(fields)
    if whole:
        if adapter:
            raise UnsupportedError(f"{path}: an adapter of a {whole.kind} in Megatron-Bridge is not read")
        fields = vision.of_text(whole, fields, settings, str(path))
    own = providers.of_fields(fields, str(path))
    if adapter:
        providers.require_no_adapter(own[0] if own else None, str(path))
    return Namespace(_with_own(fields, *own) if own else _as_args(fields, settings, path))


def vision_of(config: RunConfig, names: Iterable[str]) -> tuple[Vision, Mapping[str, Any]] | None:
    """The multimodal class that a file names, and its fields; None if the class has no vision tower.

    Args:
        config: the parsed file.
        names: the names of the tensors.
    """
    whole = visions.of_fields(config.fields)
    return None if whole is None else (visions.of_run(whole, config.fields, names), config.fields)


def require_rows(config: RunConfig, rows: int, settings: Mapping[str, Any]) -> None:
    """The embedding has the rows that Bridge makes of `vocab_size`: as many, or padded as `should_pad_vocab` has it.

    Args:
        config: the parsed file.
        rows: those of the embedding.
        settings: what overrules the file.

    Raises:
        SourceError: it has more, which would be lost as padding.
    """
    path, fields = config.path, config.fields
    count, unit = fields.get("vocab_size"), fields.get("make_vocab_size_divisible_by") or 128
    if type(count) is not int or type(unit) is not int or "vocab" in settings:
        return
    unit *= natural(fields.get("tensor_model_parallel_size") or 1, "tensor_model_parallel_size", str(path))
    padded = count if fields.get("should_pad_vocab") is False else -(-count // unit) * unit
    if rows > max(count, padded):
        raise SourceError(
            f"{path} says vocab_size = {count}, of which Megatron-Bridge makes {padded} rows, and the embedding has "
            f"{rows}: rows of tokens would be lost",
            f"take the file from where the weights come from, or override it with --set vocab={count}",
        )


def _with_own(fields: Mapping[str, Any], provider: Provider, known: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a provider's class with their defaults, and all other fields as args."""
    others = _renamed({name: value for name, value in fields.items() if name not in provider.names})
    return {**others, **{name: known[name] for name in (TARGET, *provider.names) if name in known}}


def _renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have an argument, under the name of the argument."""
    own = {*OWN, *class_defaults.of_scaling(fields)}
    known = {name: value for name, value in fields.items() if name not in own}
    return {RENAMED.get(name, name): value for name, value in known.items() if not _settled(name, value)}


def _settled(name: str, value: Any) -> bool:
    """Whether a field is a map of a setting that changes no more than rounding; any other map has to be understood."""
    return isinstance(value, dict) and (
        name in RUN or (name in FIELDS and FIELDS[name].rule in ("nothing", "rounding"))
    )


def _as_args(fields: Mapping[str, Any], settings: Collection[str], path: Path) -> dict[str, Any]:
    kind = str(fields.get(TARGET))
    if not PLAIN.fullmatch(kind):
        why = visions.lacking(kind)
        raise UnsupportedError(
            f"{path}: the class {short(kind)} is not known to compute what its fields say{why and f': {why}'}",
            "export it with the program that wrote it: AutoBridge.export_ckpt, or llm.export_ckpt of NeMo",
        )
    class_defaults.require_decided(fields, settings, str(path))
    args = _provider_args(class_defaults.with_defaults(fields), path)
    return args | class_defaults.llama3(fields, settings, str(path))


def _provider_args(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The fields of a GPTModelProvider as args.

    Raises:
        UnsupportedError: the activation is none of Megatron-LM's.
    """
    called, odd = builders.called(fields.get("activation_func"))
    function, gated = "" if odd else NAMED.get(called, ""), fields.get("gated_linear_unit")
    activation = ACTIVATIONS.get((function, gated is True))
    if activation is None:
        called += f"({', '.join(odd)})" if odd else ""
        raise UnsupportedError(f"{path}: activation_func = {short(called)} with gated_linear_unit = {short(gated)}")
    length, groups = fields.get("seq_length"), fields.get("num_query_groups")
    return {
        "max_position_embeddings": length,
        "swiglu": False,
        "quick_geglu": False,
        "squared_relu": False,
        **_renamed(fields),
        **activation,
        "bias_gelu_fusion": function in ("gelu", "quick_gelu") and fields.get("bias_activation_fusion") is True,
        "untie_embeddings_and_output_weights": fields.get("share_embeddings_and_output_weights") is False,
        "group_query_attention": groups is not None,
        "disable_bias_linear": fields.get("add_bias_linear") is False,
        "apply_layernorm_1p": fields.get("layernorm_zero_centered_gamma") is True,
        **_yarn(fields),
        **builders.computed_by(fields),
    }


def _yarn(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The args for YaRN; empty without it. Without a value of its own the range is not truncated (`round_to_int`)."""
    if fields.get("position_embedding_type") != "yarn":
        return {}
    args = {argument: fields.get(YARN_FIELDS[name]) for name, argument in YARN.items()}
    return {**dict.fromkeys(YARN_FIELDS.values()), **args, YARN["truncate"]: bool(args[YARN["truncate"]])}


def written(
    args: Mapping[str, Any],
    iteration: int,
    sections: Mapping[str, Any] | None = None,
    further: Mapping[str, Any] | None = None,
    own: Collection[str] = (),
    *,
    hint: str = "leave --for bridge out, and import the Hugging Face folder with AutoBridge.import_ckpt",
) -> dict[str, bytes]:
    """The files that Megatron-Bridge expects beside the weights, by name.

    Args:
        args: the args of Megatron-LM for the model and its training.
        iteration: the iteration in the name of the folder.
        sections: further sections of the configuration.
        further: further fields of the model's class, for a class with a vision tower.
        own: arguments that this class has beside those of a GPTModelProvider.
        hint: the way out where it does not compute the model.

    Raises:
        RefusedError: Bridge's GPTModelProvider does not compute the model.
    """
    shape = {name: args.get(name) for name in ("swiglu", "quick_geglu", "squared_relu") if args.get(name)}
    kinds = [kind for kind, arguments in ACTIVATIONS.items() if arguments == shape]
    odd = [name for name, only in SINGLE.items() if name not in own and args.get(name) not in (None, only)]
    odd += [] if args.get("position_embedding_type") in ("rope", "learned_absolute") else ["position_embedding_type"]
    odd += [] if kinds else [*shape]
    if odd:
        raise RefusedError(
            f"what Megatron-Bridge computes with {odd[0]} = {short(args.get(odd[0]))} is not known here",
            hint,
        )
    function, gated = kinds[0]
    model = {
        TARGET: vision.GPT,
        **{name: args[RENAMED.get(name, name)] for name in (*WRITTEN.split(), *own) if RENAMED.get(name, name) in args},
        "activation_func": {TARGET: FUNCTIONS[function][0], "_call_": False},
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
    """The files that Megatron-Bridge expects beside the weights of a model of a class of `providers.py`, by name.

    Args:
        provider: the class.
        spec: the model.
        args: the args of the source; those of the training are used: dropouts, and the number of consumed samples.
        options: the topology, and the deviations that the user accepted.
        dtype: torch's name of the element type.
        iteration: the iteration in the name of the folder.
        further: further fields of the model's class, for a class with a vision tower.

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
    """The entry in Bridge's files for an object of torch."""
    return {TARGET: f"torch.{name}", "_call_": False}


def _files(model: Mapping[str, Any], iteration: int, samples: int, sections: Mapping[str, Any]) -> dict[str, bytes]:
    """The files that Megatron-Bridge expects, given the fields of the model.

    The section `checkpoint` has what Bridge's loader needs (training/checkpointing.py `_load_checkpoint_from_path`).
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
    """A YAML loader without Python objects: a node that PyYAML tags as an object is loaded as its map, list or text."""


def _plain(loader: yaml.SafeLoader, _: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    return loader.construct_sequence(node, deep=True) if isinstance(node, yaml.SequenceNode) else str(node.value)


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", _plain)
