"""BLOOM in BigScience's tree of Megatron-DeepSpeed: arguments that Megatron-LM has no equivalent for.

The norm after the embedding is in the embedding's module and has its own epsilon; ALiBi has no parameters. The output
head is always tied to the embedding, whatever the arguments are.

Facts: bigscience-workshop/Megatron-DeepSpeed at 8387ae17, megatron/arguments.py, enums.py, mpu/layers.py
`VocabParallelEmbedding`, model/transformer.py; checkpoints that it wrote are in the tests, with its logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.checkpoint import Settings
from formats.errors import RefusedError, UnsupportedError, short
from formats.megatron.args import fields
from formats.megatron.args.args import confirmed
from formats.megatron.classic import with_vocab
from formats.model.codec import Codec, Context, fixed, read, rows, scalar, single, write
from formats.model.spec import ModelSpec
from formats.torch_files.pickle_values import Opaque

FAMILY = "bloom"
KIND = "position_embedding_type"
ALIBI = Opaque("megatron.enums", "PositionEmbeddingType", (3,))
"""The value of `position_embedding_type`. The enum's 1 is rotary embeddings, 2 is learned positions."""
EPSILON = 1e-5
"""The epsilon of the norm after the embedding (mpu/layers.py:180); the other norms have `layernorm_epsilon`."""


def holds(args: Mapping[str, Any]) -> bool:
    """Whether the arguments are of a model with ALiBi."""
    kind = args.get(KIND)
    return isinstance(kind, Opaque) and (kind.module, kind.name, kind.args) == (ALIBI.module, ALIBI.name, ALIBI.args)


def _epsilon(key: str) -> Codec:
    """The codec of `layernorm_epsilon`, which must equal the epsilon of the norm after the embedding."""

    def read_value(value: Any, context: Context) -> Any:
        if value != EPSILON:
            raise UnsupportedError(f"{context.where}: {key} = {short(value)} is not supported, only {EPSILON}")
        return value

    def write_value(value: float, _: Context) -> float:
        if value != EPSILON:
            raise RefusedError(
                f"BigScience's tree has an epsilon of {EPSILON} after the embedding, this model {value:g}"
            )
        return value

    return scalar(key, read_value, write_value)


TABLE = rows(
    """
layers           num_layers
hidden           hidden_size
heads            num_attention_heads
kv_heads         -                                           same as heads
head_dim         kv_channels
ffn              ffn_hidden_size
max_positions    max_position_embeddings
norm_epsilon     layernorm_epsilon                           must be 1e-5
tied             -                                           must be true
-                position_embedding_type                     write alibi
-                embed_layernorm                             = true
-                bias_gelu_fusion                            = true
-                openai_gelu                                 = false
-                glu_activation                              = null
-                apply_residual_connection_post_layernorm    = false
""",
    {
        "same as heads": lambda: Codec(lambda _, context: context.values["heads"], lambda *_: {}),
        "must be 1e-5": _epsilon,
        "must be true": fixed(True, error=lambda *_: RefusedError("BigScience's tree has no output head of its own")),
        "write alibi": single(lambda *_: None, lambda *_: ALIBI),
    },
)
"""Setting, argument and codec. `bias_gelu_fusion` selects the tanh approximation of GELU (model/fused_bias_gelu.py),
which BLOOM uses."""
UNDERSTOOD = {name for row in TABLE for names in row.keys for name in names}


def from_args(args: Mapping[str, Any], settings: Settings, base: ModelSpec | None, tag: Path, where: str) -> ModelSpec:
    """Return the spec of a BLOOM model from its arguments.

    Args:
        args: the attributes of the namespace, without those of the run.
        settings: values that overrule the arguments.
        base: the spec of the Hugging Face config beside the checkpoint, if there is one.
        tag: the folder of the checkpoint.
        where: the name of the file of the arguments in an error.

    Raises:
        UnsupportedError: the model computes something that BLOOM does not.
        RefusedError: arguments and config contradict each other.
    """
    notes = fields.require_understood(args, where, understood=UNDERSTOOD, own=UNDERSTOOD, accept=settings.accept)
    values = read(TABLE, args, (), where) | {"family": FAMILY, "notes": notes}
    values |= {"vocab": base.vocab, "max_positions": base.max_positions} if base else {}
    return with_vocab(confirmed(values | dict(settings.values), settings.values, base, where), settings, tag)


def to_args(spec: ModelSpec) -> dict[str, Any]:
    """Return the arguments with which BigScience's tree builds a model.

    Raises:
        RefusedError: the tree cannot build such a model.
    """
    return write(TABLE, vars(spec), (), "")
