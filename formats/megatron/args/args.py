"""The `args` of a Megatron checkpoint: which argument is which setting, and which have no counterpart.

An argument that changes what a model computes and has no counterpart is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.families import FAMILIES, family_named
from formats.families.family import IN_MEGATRON, Facts, Family
from formats.megatron.args import ambiguous, fields, gpt_oss, mla, moe, rope, ungated_mlp
from formats.megatron.args.fields import ASSUMED, FIELDS
from formats.megatron.args.windows import windows_per_layer
from formats.megatron.mesh import Mesh
from formats.megatron.pipeline import Pipeline
from formats.model.spec import ModelSpec, checked, differences, some_layers, whole
from formats.torch_files.pickle_values import DTYPES, Dtype, keeps

CORE = "megatron-core"
"""The dialect that this table is of."""
DIST = "torch_dist"
"""The same arguments, in a distributed checkpoint (`megatron/torch_dist.py`)."""

MEGATRON = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "ffn": "ffn_hidden_size",
    "max_positions": "max_position_embeddings",
    "norm_epsilon": "layernorm_epsilon norm_epsilon",
    "rope_theta": "rotary_base",
    "rotary_fraction": "rotary_percent",
}
"""Setting: argument and its older spellings (megatron/training/arguments.py at 0.18 and at d98e8a64)."""

GATED: Mapping[str, tuple[Any, ...]] = {
    "swiglu": (True,),
    "normalization": ("RMSNorm",),
    "add_bias_linear": (False, True),
    "disable_bias_linear": (True, False),
}
"""What sets the descendants of Llama apart; the first value is also what an absent argument means."""

USUAL = ("llama", "mistral", "starcoder2")
"""What a model without a config is, of several families that Megatron does not tell apart."""


def from_megatron(
    args: Mapping[str, Any],
    settings: Mapping[str, Any],
    base: ModelSpec | None,
    where: str,
    *,
    accept: Collection[str] = (),
    settled: bool = False,
) -> ModelSpec:
    """Read the `args` of a Megatron checkpoint.

    Args:
        args: the attributes of the namespace.
        settings: values that overrule it.
        base: the spec of the Hugging Face config that travels with the checkpoint, if there is one.
        where: what to call the file in an error.
        accept: arguments that the user names, to be taken as if they were at a value that is understood.
        settled: whether the args say what the model computes, whichever version made them: a conversion wrote them.

    Raises:
        SourceError: a setting is missing.
        UnsupportedError: the model computes something that has no layout here.
        RefusedError: args and config contradict each other, or the version that made the args ignored some of them.
    """
    args = args if settled else ambiguous.named(args, settings, where)
    rotary = bool(args.get("use_rotary_position_embeddings"))  # which older trees have beside another embedding type
    args = {**args, "position_embedding_type": "rope"} if rotary else args
    sinks = gpt_oss.here(args)
    plain = ungated_mlp.here(args) and not sinks
    latent = mla.here(args)
    only = {**(gpt_oss.ONLY if sinks else ungated_mlp.ONLY if plain else GATED)}
    only |= mla.ONLY if latent else {}
    understood = {*only, *(gpt_oss.READ if sinks else ())}
    notes = fields.require_understood(args, where, understood=understood, accept=accept)
    require_only(args, only, where)
    notes += gpt_oss.clamped(args, accept, where) if sinks and not settled else []
    values = found_in(args, MEGATRON) | {"notes": notes}
    if not args.get("group_query_attention") or values["kv_heads"] is None:
        values["kv_heads"] = values["heads"]
    if values["head_dim"] is None:
        values["head_dim"] = whole(values["hidden"], "hidden", where) // whole(values["heads"], "heads", where)
    untied = args.get("untie_embeddings_and_output_weights")
    values["tied"] = None if untied is None else not untied
    values["sliding_window"] = _window(args.get("window_size"), where)
    windows = [] if sinks else windows_per_layer(args, values["layers"], where)
    values["full_layers"] = tuple(layer for layer, one in enumerate(windows) if not one)
    values["nope_layers"] = _nope_layers(args.get("no_rope_freq"), values["layers"], where)
    kind = args.get("position_embedding_type")
    if latent:
        values |= mla.found(args, values["norm_epsilon"], where)

    def scaling(args: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return mla.scaling(args, base, where) if latent else rope.scaling(args, base, where)

    if "rope_scaling" not in settings:
        values["rope_scaling"] = scaling(args) if settled else ambiguous.rope_scaling(args, scaling, base, where)
    if sinks:
        values["own"] = gpt_oss.found(args, values["layers"], base, where)
    learned = kind == "learned_absolute"
    if learned:
        values |= dict.fromkeys(("rope_theta", "rope_scaling", "rotary_fraction"))
    # not `vocab_size`: older trees add a token to it, and most runs leave it to the tokenizer
    values["vocab"] = args.get("true_vocab_size") or (base.vocab if base else None)
    biased = sinks or ungated_mlp.biased(args, where)
    facts = ungated_mlp.found(args, where) if plain else Facts(biased=biased)
    if plain:
        usual = base.activation if base else "gelu_new" if learned else None
        values["activation"] = ungated_mlp.activation(args, facts.biased, usual, where)
    experts, tensors, router = moe.found(args, values, where)
    values |= experts
    qkv_bias, qk_norm = bool(args.get("add_qkv_bias")), bool(args.get("qk_layernorm")) and not latent
    facts = facts._replace(qkv_bias=qkv_bias, qk_norm=qk_norm, learned=learned, sinks=sinks)
    facts = facts._replace(latent=latent, experts=tensors, router=router)
    return agreed(values, facts, settings, base, where)


def found_in(args: Mapping[str, Any], table: Mapping[str, str]) -> dict[str, Any]:
    """Each setting of a table, from the first of its arguments that has a value; None without one."""
    return {
        setting: next((args[name] for name in names.split() if args.get(name) is not None), None)
        for setting, names in table.items()
    }


def require_only(args: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Each argument of a table has one of its values, or is absent, which means the first.

    Raises:
        UnsupportedError: one has another value.
    """
    for name, allowed in table.items():
        value = args.get(name, allowed[0])
        if not any(fields.equal(value, known) for known in allowed):
            raise UnsupportedError(f"{where}: {name} = {short(value)} is not supported, only {allowed[0]!r}")


def agreed(
    values: Mapping[str, Any],
    facts: Facts,
    settings: Mapping[str, Any],
    base: ModelSpec | None,
    where: str,
    *,
    apart: Collection[str] = (),
) -> ModelSpec:
    """The spec that args make, and that the config which travels with them does not contradict.

    Args:
        values: what the args say.
        facts: what they say besides; the sliding window and a partial rotary embedding follow from the values.
        settings: values that overrule both.
        base: the spec of the config.
        where: what to call the file of the args in an error.
        apart: settings in which the two may differ.

    Raises:
        RefusedError: args and config contradict each other.
    """
    values = {**values, **settings}
    fraction = 1.0 if values.get("rotary_fraction") is None else values["rotary_fraction"]
    nope, window = bool(values.get("nope_layers")), values["sliding_window"] is not None
    layered = window and bool(values.get("full_layers"))
    facts = facts._replace(window=window, layered=layered, partial=fraction != 1.0, nope=nope)
    values["family"] = _family(facts, base, where)
    if facts.experts:
        values = moe.chosen(values, base, where)
    choices = {*family_named(values["family"]).keys, *settings}
    values["rotary_fraction"] = fraction if "rotary_fraction" in choices else None
    values["biases"] = family_named(values["family"]).chosen(facts) or ()
    for name in ("nope_layers", "full_layers"):
        values[name] = values.get(name) if name in choices else None
    notes = [*values.get("notes", ())]
    rotary = family_named(values["family"]).rope_theta is not None  # otherwise there is a weight for each position
    if rotary and base and values["max_positions"] != base.max_positions and "max_positions" not in settings:
        notes.append(f"max_positions = {base.max_positions} as in the config, {where} has {values['max_positions']}")
        values["max_positions"] = base.max_positions
    spec = checked(values | {"notes": tuple(notes)}, where)
    if base:
        free = {*settings, *apart}
        contradictions = [line for line in differences(spec, base) if line.partition(":")[0] not in free]
        if contradictions:
            raise RefusedError(
                f"{where} and its config contradict each other (args | config): {'; '.join(contradictions)}",
                "decide with --set NAME=VALUE, or give the right config with --config",
            )
    return spec


def _window(window: Any, where: str) -> int | None:
    """Tokens that a token sees, itself included: Megatron counts those to its left (transformer/utils.py:38)."""
    match window:
        case None:
            return None
        case [int(left), int(right)] if left >= 0 and right in (0, -1):
            return left + 1
        case [-1, int()]:
            return None
    raise UnsupportedError(f"{where}: window_size = {short(window)} is not supported, only (left, 0)")


def _nope_layers(frequency: Any, layers: Any, where: str) -> tuple[int, ...]:
    """The layers in which nothing rotates (transformer/transformer_config.py `no_rope_freq`)."""
    numbers = some_layers(layers)
    match frequency:
        case None:
            return ()
        case int(step) if type(step) is int and step > 0 and len(numbers) % step == 0:
            return tuple(layer for layer in numbers if (layer + 1) % step == 0)
        case list(said) if len(said) == layers and all(one in (0, 1) for one in said):
            return tuple(layer for layer in numbers if said[layer])
    raise UnsupportedError(f"{where}: no_rope_freq = {short(frequency)} says nothing about {short(layers)} layers")


def _family(facts: Facts, base: ModelSpec | None, where: str) -> str:
    """The family with these facts."""

    def order(family: Family) -> tuple[bool, int, bool, bool]:
        """One of the user's own comes first, then the usual ones, then those of which least has to be chosen."""
        usual = USUAL.index(family.name) if family.name in USUAL else len(USUAL)
        return family.file is None, usual, family.chosen(facts) != family.biases_of({}), bool(family.biases)

    fitting = [family.name for family in sorted(FAMILIES.values(), key=order) if family.fits(facts)]
    if base and base.family in fitting:
        return base.family
    if base:
        raise RefusedError(
            f"{where} describes a model like {' or '.join(fitting) or 'none known'}, its config a {base.family}"
        )
    if not fitting:
        raise UnsupportedError(
            f"{where}: no known family has this combination of norms, biases, query/key norms, sliding window, partial "
            "rotary embedding or learned positions, and experts"
        )
    return fitting[0]


def to_megatron(spec: ModelSpec) -> dict[str, Any]:
    """The model settings of a Megatron namespace, with both spellings where two exist.

    Raises:
        RefusedError: Megatron has no such rotary embedding, or no such activation.
    """
    facts = spec.facts
    _check_biases(spec)
    args: dict[str, Any] = {
        name: getattr(spec, setting) for setting, names in MEGATRON.items() for name in names.split()
    }
    args |= {name: allowed[0] for name, allowed in GATED.items()}
    args |= {"add_bias_linear": facts.biased, "disable_bias_linear": not facts.biased}
    args |= ungated_mlp.arguments(spec) if facts.plain else {}
    theta = 10000 if spec.rope_theta is None else spec.rope_theta  # a default that learned positions do not heed
    args |= moe.arguments(spec)
    args |= {
        "position_embedding_type": "rope" if spec.rope_theta is not None else "learned_absolute",
        "rotary_base": int(theta) if theta == int(theta) else theta,
        "rotary_percent": 1.0 if spec.rotary_fraction is None else spec.rotary_fraction,
        "group_query_attention": spec.kv_heads != spec.heads,
        "use_rotary_position_embeddings": False,
        "add_position_embedding": True,
        "untie_embeddings_and_output_weights": not spec.tied,
        "add_qkv_bias": facts.qkv_bias and (facts.sinks or not facts.biased),
        "qk_layernorm": facts.qk_norm,
        "no_rope_freq": [int(layer in spec.nope_layers) for layer in range(spec.layers)] if spec.nope_layers else None,
        "window_size": None if spec.sliding_window is None else (spec.sliding_window - 1, 0),
        "window_attn_skip_freq": None,
        "seq_length": spec.max_positions,
        "vocab_size": spec.vocab,
        "true_vocab_size": spec.vocab,
    }
    if spec.full_layers and spec.sliding_window:
        args["window_attn_skip_freq"] = [int(layer not in spec.full_layers) for layer in range(spec.layers)]
    args |= rope.arguments(replace(spec, rope_scaling=None) if facts.latent else spec)
    args |= mla.arguments(spec) if facts.latent else {}
    return args | (gpt_oss.arguments(spec) if facts.sinks else {})


def _check_biases(spec: ModelSpec) -> None:
    """Megatron has biases nowhere, on query, key and value, or on every linear layer (`IN_MEGATRON`).

    Raises:
        RefusedError: the model has others.
    """
    if spec.biases not in IN_MEGATRON:
        raise RefusedError(
            "megatron-core has biases on query, key and value alone (--add-qkv-bias) or on every linear layer, "
            f"and this {spec.family} has {' and '.join(spec.biases)} alone"
        )


@dataclass(frozen=True)
class Options:
    """How a checkpoint is to be written.

    Attributes:
        tp: tensor parallel size.
        pp: pipeline parallel size.
        vpp: virtual pipeline chunks of each stage.
        norm: the names of the norms: `te` (Transformer Engine) or `local`.
        ep: over how many ranks experts are spread.
        etp: tensor parallel size of an expert; None for `tp`.
        experts: the names of the experts: `te` (its grouped layers) or `local` (one by one); None for those of `norm`.
        vocab_multiple: the padded vocabulary is the next multiple of this times tp.
        dialect: `megatron-core`, `torch_dist`, or `megatron-llm`.
        first_layers: layers of the first stage, where it has not as many as the others.
        last_layers: the same for the last stage.
        layout: the pipeline in Megatron's words, such as `Et*3|(tt|)*29L`; it must have pp * vpp entries.
        interleave: rows of gate, then of up, that alternate in an expert; 0 where all of gate is first.
        shared_interleave: the same of shared experts.
        version: the Megatron-LM that the flags are for; None for the newest that computes the model.
        accepted: deviations from the model that the user named (`versions.DEVIATIONS`).
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    norm: str = "te"
    vocab_multiple: int = 128
    dialect: str = CORE
    first_layers: int | None = None
    last_layers: int | None = None
    layout: str | None = None
    ep: int = 1
    etp: int | None = None
    experts: str | None = None
    interleave: int = 0
    shared_interleave: int = 0
    version: str | None = None
    accepted: tuple[str, ...] = ()

    @property
    def pipeline(self) -> Pipeline:
        """How the layers are cut."""
        return Pipeline(self.pp, self.vpp, self.first_layers, self.last_layers, layout=self.layout)

    @property
    def mesh(self) -> Mesh:
        """How the tensors of a pipeline stage are cut."""
        return Mesh(self.tp, self.ep, self.etp or self.tp, self.interleave, self.shared_interleave)


def main_dtype(dtypes: Iterable[str]) -> str:
    """What torch calls the element type that most tensors have."""
    counted = list(dtypes)
    main = max(counted, key=counted.count)
    return next((name for name, dtype in DTYPES.items() if dtype == main), "float32")


def namespace(
    spec: ModelSpec, dtypes: Iterable[str], options: Options, padded: int, old: Mapping[str, Any], iteration: int | None
) -> dict[str, Any]:
    """The namespace that Megatron's loader reads (megatron/training/checkpointing.py `load_args_from_checkpoint`)."""
    kept = {name: value for name, value in old.items() if keeps(name) and keeps(value)}
    kept = {name: value for name, value in kept.items() if name not in FIELDS or not FIELDS[name].same}
    torch_name = main_dtype(dtypes)
    uneven = (options.first_layers, options.last_layers, options.layout) != (None, None, None)
    per_chunk = spec.layers // (options.pp * options.vpp) if options.vpp > 1 and not uneven else None
    base = {
        **ASSUMED,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "tokenizer_type": None,
        "tokenizer_model": None,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    } | kept
    return base | to_megatron(spec) | moe.sizes(spec, options.mesh, options.experts or options.norm) | {
        "seq_length": kept.get("seq_length", spec.max_positions),
        "transformer_impl": "transformer_engine" if options.norm == "te" else "local",
        "tensor_model_parallel_size": options.tp,
        "pipeline_model_parallel_size": options.pp,
        "virtual_pipeline_model_parallel_size": options.vpp if options.vpp > 1 else None,
        "num_layers_per_virtual_pipeline_stage": per_chunk,
        "decoder_first_pipeline_num_layers": options.first_layers,
        "decoder_last_pipeline_num_layers": options.last_layers,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "pipeline_model_parallel_layout": options.layout,
        "context_parallel_size": 1,
        "data_parallel_size": options.mesh.ranks // options.tp,
        "world_size": options.mesh.ranks * options.pp,
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": options.vocab_multiple,
        "params_dtype": Dtype(torch_name),
        "bf16": torch_name == "bfloat16",
        "fp16": torch_name == "float16",
        "iteration": iteration or 0,
        "ckpt_format": DIST if options.dialect == DIST else "torch",
        "use_legacy_models": False,
        "no_save_optim": True,  # so that nobody looks for them in a distributed checkpoint
        "no_save_rng": True,
    }  # fmt: skip
