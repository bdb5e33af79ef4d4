"""BLOOM in BigScience's tree of Megatron-DeepSpeed: its arguments, which Megatron-LM has no words for.

The norm after the embedding is inside it, and has an epsilon of its own; slopes of heads (ALiBi) have no parameters.
The head shares the embedding, whatever is said. Facts: bigscience-workshop/Megatron-DeepSpeed at 8387ae17, megatron/
arguments.py, enums.py, mpu/layers.py `VocabParallelEmbedding`, model/transformer.py; checkpoints that it wrote are in
the tests, with its own logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.checkpoint import Settings
from formats.errors import RefusedError, UnsupportedError, short
from formats.megatron.args import fields
from formats.megatron.args.args import confirmed
from formats.megatron.args.codecs import only
from formats.megatron.classic import with_vocab
from formats.model.codec import Codec, Context, Maker, Spelled, read, rows, scalar, write
from formats.model.spec import ModelSpec
from formats.torch_files.pickle_values import Opaque

FAMILY = "bloom"
KIND = "position_embedding_type"
ALIBI = Opaque("megatron.enums", "PositionEmbeddingType", (3,))
"""Its positions. Of 1 the enum makes those that rotate, of 2 learned ones."""
EPSILON = 1e-5
"""Of the norm after the embedding (mpu/layers.py:180); the others have `layernorm_epsilon`."""


def holds(args: Mapping[str, Any]) -> bool:
    """Whether arguments are those of a model with ALiBi."""
    kind = args.get(KIND)
    return isinstance(kind, Opaque) and (kind.module, kind.name, kind.args) == (ALIBI.module, ALIBI.name, ALIBI.args)


def _alibi(key: str) -> Codec:
    return Codec(lambda *_: None, lambda *_: {key: ALIBI})


def _follows(setting: str) -> Maker:
    """What no argument says: it is as another setting."""
    return lambda: Codec(lambda _, context: context.values[setting], lambda *_: {})


def _epsilon(key: str) -> Codec:
    """That of all norms, which has to be that of the one after the embedding."""

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


def _tied() -> Codec:
    def write_value(value: bool, _: Context) -> Spelled:
        if not value:
            raise RefusedError("BigScience's tree has no output head of its own")
        return {}

    return Codec(lambda *_: True, write_value)


TABLE = rows(
    """
layers            num_layers
hidden            hidden_size
heads             num_attention_heads
kv_heads          -                                           heads
head_dim          kv_channels
ffn               ffn_hidden_size
max_positions     max_position_embeddings
norm_epsilon      layernorm_epsilon                           epsilon
tied              -                                           tied
-                 position_embedding_type                     alibi
-                 embed_layernorm                             = true
-                 bias_gelu_fusion                            = true
-                 openai_gelu                                 = false
-                 glu_activation                              = null
-                 apply_residual_connection_post_layernorm    = false
""",
    {
        **only(True, False, None),
        "heads": _follows("heads"), "epsilon": _epsilon, "tied": _tied, "alibi": _alibi,
    },
)  # fmt: skip
"""A fused bias makes GELU the approximation with tanh (model/fused_bias_gelu.py), which is BLOOM's."""
UNDERSTOOD = {name for row in TABLE for names in row.keys for name in names}


def from_args(args: Mapping[str, Any], settings: Settings, base: ModelSpec | None, tag: Path, where: str) -> ModelSpec:
    """Read the arguments.

    Args:
        args: the attributes of the namespace, but for those of the run.
        settings: values that overrule it.
        base: the spec of the config that travels along.
        tag: the folder.
        where: what to call the file of the arguments in an error.

    Raises:
        UnsupportedError: the model computes something that BLOOM does not.
        RefusedError: arguments and config contradict each other.
    """
    notes = fields.require_understood(args, where, understood=UNDERSTOOD, own=UNDERSTOOD, accept=settings.accept)
    values = read(TABLE, args, (), where) | {"family": FAMILY, "notes": notes}
    values |= {"vocab": base.vocab, "max_positions": base.max_positions} if base else {}
    return with_vocab(confirmed(values | dict(settings.values), settings.values, base, where), settings, tag)


def to_args(spec: ModelSpec) -> dict[str, Any]:
    """The arguments that make the tree build a model.

    Raises:
        RefusedError: it has no such model.
    """
    return write(TABLE, vars(spec), (), "")
