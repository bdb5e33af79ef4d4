"""Megatron-LLM: a fork of Megatron-LM of early 2023 with its own spellings, orders and arguments.

Files and folders are those of `classic.py`. The tables differ: up comes before gate, the rows of a rotary head are
interleaved, the output head is a bare tensor, and settings have other names.

Facts: epfLLM/Megatron-LLM at 806a8330 and xingyaoww/Megatron-LLM at 1b075777 (weights_conversion/, tools/,
megatron/checkpointing.py, megatron/arguments.py, megatron/model/), whose programs wrote the files in
tests/golden/megatron_llm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Settings
from formats.disk.json_file import read_json
from formats.errors import RefusedError, SourceError, UnsupportedError
from formats.families import family_named
from formats.families.family import Family
from formats.layout.table import Rule, rules
from formats.megatron.args import fields
from formats.megatron.args.args import agreed
from formats.megatron.args.options import Options, main_dtype
from formats.megatron.args.table import conditions, described
from formats.megatron.pipeline import Pipeline
from formats.model.checks import lost_setting
from formats.model.codec import Codec, Context, Spelled, read, rows, single, write
from formats.model.spec import ModelSpec
from formats.model.values import positive_float, positive_int
from formats.torch_files.pickle_values import Dtype, Opaque, is_plain

NAME = "megatron-llm"
FRESH = "--no_load_optim --no_load_rng"
TOKENIZER = "tokenizer.model"
"""The SentencePiece model beside the tracker, which the training is to use."""

_TABLE = """
language_model.embedding.word_embeddings.weight                                 (embedding: vocab | ~padding)/tp hidden    first
language_model.encoder.layers.{layer}.input_layernorm.weight                    input_norm: hidden
language_model.encoder.layers.{layer}.self_attention.query_key_value.weight     (group (query: head pair half | key: pair half | value: dim))/tp hidden
language_model.encoder.layers.{layer}.self_attention.dense.weight               output: hidden (group head dim)/tp
language_model.encoder.layers.{layer}.post_attention_layernorm.weight           post_norm: hidden
language_model.encoder.layers.{layer}.mlp.dense_h_to_4h.weight                  (up: ffn/tp | gate: ffn/tp) hidden
language_model.encoder.layers.{layer}.mlp.dense_4h_to_h.weight                  down: hidden ffn/tp
language_model.encoder.final_layernorm.weight                                   final_norm: hidden    last
language_model.lm_head                                                          (head: vocab | ~padding)/tp hidden    last
"""
TRAINED = rules(_TABLE)
"""The layout that the training and the re-sharder write; written here too, since all of upstream's programs read it."""
CONVERTED = rules(_TABLE.replace(".encoder.", ".transformer.").replace(".self_attention.", ".attention."))
"""The layout that hf_to_megatron.py writes."""

LOST = {"norm_epsilon": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "sliding_window": None}
"""Settings that the re-sharder loses, and the defaults in its files instead (tools/checkpoint_saver_megatron.py)."""


def _read_head_dim(value: Any, context: Context) -> int:
    hidden, heads = (positive_int(context.values[name], name, context.where) for name in ("hidden", "heads"))
    if value not in (None, hidden // heads):
        raise UnsupportedError(f"{context.where}: Megatron-LLM turns {hidden // heads} elements of a head, not {value}")
    return hidden // heads


def _read_scaling(value: Any, context: Context) -> Mapping[str, Any] | None:
    factor = positive_float(value or 1.0, "rope_scaling_factor", context.where)
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _flash(key: str) -> Codec:
    """A codec of whether attention is flash-attn's, which alone has the window (model/transformer.py:517)."""

    def read_flash(spelled: Spelled, context: Context) -> None:
        window, length = context.values["sliding_window"], context.file.get("seq_length")
        if type(window) is type(length) is int and length > window and spelled.get(key) is False:
            raise UnsupportedError(
                f"{context.where}: sliding_window_size = {window} with seq_length = {length} and {key} = False: in "
                "Megatron-LLM flash-attn alone keeps to a window",
                f"--set sliding_window=none (the stock tree) or --set sliding_window={window}",
            )

    return Codec(read_flash, lambda _, context: {key: True} if context.values["sliding_window"] else {})


TABLE = rows(
    """
layers            num_layers|encoder_num_layers
hidden            hidden_size
heads             num_attention_heads
kv_heads          num_attention_heads_kv                      default heads
head_dim          kv_channels                                 must be hidden / heads
ffn               ffn_hidden_size
max_positions     max_position_embeddings
norm_epsilon      layernorm_epsilon
rope_theta        rope_theta                                  default 10000.0
sliding_window    sliding_window_size
-                 use_flash_attn                              true with a window
-                 glu_activation                              = "swiglu"
-                 use_rms_norm                                = true
-                 position_embedding_type                     = "rotary"
tied              tie_embed_logits                            = false
-                 use_bias                                    = false
-                 use_post_ln                                 = false
-                 parallel_attn                               = false
-                 parallel_layernorm                          = false
-                 apply_residual_connection_post_layernorm    = false
rope_scaling      rope_scaling_factor                         linear factor
vocab             true_vocab_size
""",
    {
        "must be hidden / heads": single(_read_head_dim),
        "true with a window": _flash,
        "linear factor": single(_read_scaling, lambda scaling, _: (scaling or {}).get("factor", 1.0)),
    },
)
"""Settings and their arguments (megatron/arguments.py). Arguments with a fixed value have the one that upstream's Llama
and Mistral assert (model/llama_model.py)."""

ONLY_SAID = ("glu_activation", "use_rms_norm", "position_embedding_type", "tie_embed_logits")
"""Arguments that have to be recorded, since their defaults are of another model."""

OWN = {name for row in TABLE for names in row.keys for name in names}
"""The arguments of layout and computation, many of which Megatron-LM never had."""

RUN = """
bias_droput_fusion data_type lima_dropout load_iters loss_role metrics model_name new_tokens packed_input
scalar_loss_mask skip_iters vocab_extra_ids_list wandb_api_key wandb_id wandb_logger wandb_resume
"""
"""Further arguments that Megatron-LM never had: settings of a run, which are not in the table."""

WINDOW = 4096
"""The sliding window in tokens that finetune.py sets with `--model_name mistral`."""


# --- reading ---------------------------------------------------------------------------------------------------------


def wrote(keys: Collection[str], args: Mapping[str, Any]) -> bool:
    """Whether Megatron-LLM wrote a checkpoint: it has a bare output head, or an argument that only Megatron-LLM has."""
    return "language_model.lm_head" in keys or "glu_activation" in args


def table(keys: Iterable[str]) -> tuple[Rule, ...]:
    """The layout table of a checkpoint, by the keys in it."""
    return CONVERTED if any(key.startswith("language_model.transformer.") for key in keys) else TRAINED


def from_args(
    args: Mapping[str, Any], settings: Settings, base: ModelSpec | None, assets: Path | None, release: bool, where: str
) -> ModelSpec:
    """The spec of a model from the `args` of its checkpoint.

    Args:
        args: the attributes of the namespace.
        settings: the user's settings.
        base: the spec of the Hugging Face config that travels with the checkpoint, if there is one.
        assets: the folder of that config.
        release: whether the checkpoint is a release, of which nothing was trained.
        where: what to call the file in an error.

    Raises:
        SourceError: a setting is missing.
        UnsupportedError: the model computes something that has no layout here.
        RefusedError: args and config contradict each other.
    """
    stated = {**dict.fromkeys(ONLY_SAID), **args}
    if _is_rotary(args.get("position_embedding_type")):
        stated["position_embedding_type"] = "rotary"
    if release or "sliding_window" in settings.values:
        stated["use_flash_attn"] = None
    own = {*OWN, *RUN.split()}
    judged = {name for row in TABLE if row.setting == "-" for names in row.keys for name in names}
    notes = fields.require_understood(args, where, understood=judged, own=own, accept=settings.accept)
    values = read(TABLE, stated, (), where)
    if args.get("perform_initialization") is False:  # only the re-sharder sets it
        forgotten = [name for name, default in LOST.items() if values[name] == default]
        known = "as in the config" if base else "its defaults are taken; --config BASE has the true ones"
        notes += [f"Megatron-LLM's re-sharder forgets {', '.join(forgotten)}: {known}"]
        values |= {name: getattr(base, name) for name in forgotten if base}
    values["vocab"] = vocab = settings.vocab_size or values["vocab"] or _vocab(args, base, assets, release)
    lost = base is not None and isinstance(vocab, int) and vocab < (base.vocab or 0)  # a training only adds tokens
    values |= {"notes": notes, **described(())}
    spec = agreed(values, conditions(()), settings.values, base, where, may_differ=() if lost else ("vocab",))
    return replace(spec, notes=(*spec.notes, *window_notes(spec)))


def window_notes(spec: ModelSpec) -> tuple[str, ...]:
    """The note on a sliding window, if there is one: flash-attn looks back that many tokens (model/transformer.py).

    The number is kept all the same: upstream's converters keep it, and its Mistral takes only the number in the Hub's
    config.
    """
    if spec.sliding_window is None:
        return ()
    setting = f"sliding_window_size = {spec.sliding_window}"
    return (
        f"{setting} of Megatron-LLM sees a token more than that of transformers, and only flash attention has it there; "
        "its own converters keep it too",
    )


def _is_rotary(value: Any) -> bool:
    """Whether a value is `PositionEmbeddingType.rotary`, which pickle stores by its number (model/enums.py)."""
    return isinstance(value, Opaque) and value.name == "PositionEmbeddingType" and value.args == (1,)


def added_tokens(args: Mapping[str, Any]) -> tuple[str, ...]:
    """The tokens that the training added to its tokenizer, in the order of their ids."""
    names = args.get("vocab_extra_ids_list")
    return tuple(names.split(",")) if isinstance(names, str) and names else ()


def _vocab(args: Mapping[str, Any], base: ModelSpec | None, assets: Path | None, release: bool) -> int | None:
    """The true vocabulary size from a checkpoint and its model's config; None if these do not determine it.

    hf_to_megatron.py pads nothing. A re-sharded training has lost which tokens its tokenizer added, and a training
    without --no_new_tokens added up to seven tokens of its own.
    """
    if "perform_initialization" not in args:
        return positive_int(args.get("padded_vocab_size"), "padded_vocab_size", "args")
    if base is None or base.vocab is None:
        return None
    if args["perform_initialization"] is False:
        return base.vocab if release else None
    pieces, added = _tokens(assets) if assets else ({}, {})
    new = [token for token in added_tokens(args) if token not in pieces]
    expected = {token: len(pieces) + number for number, token in enumerate(new)}
    beyond = {token: number for token, number in added.items() if number >= len(pieces)}
    if args.get("new_tokens", True) or args.get("vocab_extra_ids") or not pieces or beyond.items() - expected.items():
        return None
    return max(base.vocab, len(pieces) + len(new))


def _tokens(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """The pieces and the added tokens of a folder's tokenizer.json, with their ids; empty without a tokenizer.json.

    Raises:
        SourceError: the tokens are in an unknown form.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}, {}
    record = read_json(path)
    try:
        vocab = record["model"]["vocab"]
        pieces = vocab if isinstance(vocab, dict) else {token: number for number, (token, *_) in enumerate(vocab)}
        return pieces, {added["content"]: int(added["id"]) for added in record.get("added_tokens") or []}
    except (TypeError, KeyError, ValueError):
        raise SourceError(f"{path} holds tokens in a form that no tokenizer has") from None


# --- both directions -------------------------------------------------------------------------------------------------


def check_topology(spec: ModelSpec, tp: int, pipeline: Pipeline) -> None:
    """Refuse a topology that Megatron-LLM's attention cannot compute or its re-sharder does not read.

    Raises:
        RefusedError: key/value groups would have to be cut (model/transformer.py `ParallelAttention`).
        UnsupportedError: there are virtual pipeline chunks, or stages of different sizes.
    """
    if spec.kv_heads % tp:
        raise RefusedError(f"{spec.kv_heads} key/value groups do not divide over tp = {tp}, and Megatron-LLM cuts none")
    if pipeline.virtual > 1:
        raise UnsupportedError("virtual pipeline chunks of Megatron-LLM are not supported, its own re-sharder has none")
    if pipeline != Pipeline(pipeline.stages):
        raise UnsupportedError("pipeline stages of Megatron-LLM hold equally many layers", "leave the other sizes out")


# --- writing ---------------------------------------------------------------------------------------------------------


def unsupported_reason(family: Family, biases: Collection[str] | None = None) -> str:
    """Why Megatron-LLM holds no model of a family; empty if it does.

    Args:
        family: the family.
        biases: the biases of the model; None for the default biases of the family.
    """
    biases = family.biases_of({}) if biases is None else biases
    traits = family.traits_with(biases)
    reasons = {
        "its Llama and Mistral have no biases": bool({"output_bias", "mlp_bias"}.intersection(biases)),
        "its norms are RMSNorm and its MLP has a gate": "ungated" in traits,
        "its linear layers have biases everywhere or nowhere, and this model has them on query, key and value": (
            "qkv_bias" in traits
        ),
        "it has no norms on query and key": "qk_norm" in traits,
        "its positions are rotary, in every layer": family.rope_theta is None or "nope_layers" in family.keys,
        "its window holds for every layer": "full_layers" in family.keys,
        "its MLP has no experts": "moe" in traits,
        "it has no latents of keys and values (MLA)": "latent" in traits,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def check_spec(spec: ModelSpec) -> None:
    """Refuse a model that Megatron-LLM cannot hold.

    Raises:
        RefusedError: the model has other tensors or another rotary embedding than Megatron-LLM's Llama and Mistral.
    """
    family_lacks, lost = unsupported_reason(family_named(spec.family), spec.biases), lost_setting(TABLE, (), spec)
    scaling = dict(spec.rope_scaling or {})
    reasons = {
        family_lacks: bool(family_lacks),
        f"it has no {lost}": bool(lost),
        "its Llama and Mistral have an output head of their own, and this model shares the embedding's": spec.tied,
        f"its rotary embedding turns hidden / heads = {spec.hidden // spec.heads} elements of a head, "
        f"and a head of this model has {spec.head_dim}": spec.head_dim * spec.heads != spec.hidden,
        f"of rope scalings it only knows linear ones, not {scaling.get('rope_type')}": (
            bool(scaling) and (scaling.get("rope_type") != "linear" or not {*scaling} <= {"rope_type", "factor"})
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise RefusedError(f"Megatron-LLM cannot hold this {spec.family}: {reason}", "use --format torch")


def namespace(
    spec: ModelSpec, dtypes: Iterable[str], options: Options, padded: int, old: Mapping[str, Any], iteration: int | None
) -> dict[str, Any]:
    """The namespace `args` that Megatron-LLM's `load_args_from_checkpoint` and `check_checkpoint_args` read.

    Args:
        spec: the model.
        dtypes: the element types of its tensors.
        options: the topology.
        padded: rows of the embedding.
        old: the args of the source; those that the model and the topology do not determine are kept.
        iteration: the iteration; None for a release.
    """
    carried = {name: value for name, value in old.items() if is_plain(name) and is_plain(value)}
    dtype = main_dtype(dtypes)
    base = {
        "seq_length": spec.max_positions,
        "tokenizer_type": "SentencePieceTokenizer",
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_gelu_fusion": False,
        "bias_droput_fusion": False,
    } | carried
    return base | write(TABLE, vars(spec), (), "") | {
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": options.vocab_multiple,
        "tensor_model_parallel_size": options.tp,
        "pipeline_model_parallel_size": options.pp,
        "num_layers_per_virtual_pipeline_stage": None,
        "data_parallel_size": 1,
        "world_size": options.tp * options.pp,
        "params_dtype": Dtype(dtype),
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "perform_initialization": True,
        "iteration": "release" if iteration is None else iteration,
    }  # fmt: skip


def flags(args: Mapping[str, Any]) -> str:
    """The flags that finetune.py does not take from a checkpoint, not even with --use_checkpoint_args."""
    lines = [
        "--use_checkpoint_args",
        f"--model_name {'mistral' if args['sliding_window_size'] == WINDOW else 'llama2'}",
        f"--layernorm_epsilon {args['layernorm_epsilon']}",
        f"--rope_theta {args['rope_theta']}",
        f"--rope_scaling_factor {args['rope_scaling_factor']}",
    ]
    lines += ["--use_flash_attn"] if args["sliding_window_size"] else []
    lines += ["--bf16"] if args["bf16"] else ["--fp16"] if args["fp16"] else []
    lines += ["--no_load_optim", "--no_load_rng"] if args["iteration"] != "release" else []
    return "\n".join(lines) + "\n"


def place(key: str) -> tuple[str, ...]:
    """The path of a tensor's key in the nested maps of a file."""
    model, part, rest = (*key.split(".", 2), "")[:3]
    return (model, part, rest) if part == "encoder" else tuple(key.split("."))
