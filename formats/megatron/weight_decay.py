"""Which parameters of a Megatron training decay, and how, where an option changes it.

Nothing in a checkpoint says which parameters decay: they are told by their shapes (`chained_optimizer.decays`). Options
that make exceptions are args of Megatron-LM, or are in the file of Megatron-Bridge or NeMo:

    --embedding-init-method-std X         0.14 and 0.15 alone: embeddings do not decay
    --no-weight-decay-cond-type NAME      0.15 (`apply_wd_to_qk_layernorm`, or `qwen3_next`): query and key norms do
    --apply-wd-to-qk-layernorm            since 0.16: likewise
    decoupled_weight_decay                no option, but stock takes each field of OptimizerConfig that args have
    run_config.yaml, `scheduler`          no_weight_decay_cond_type, of Megatron-Bridge
    run_config.yaml, `optimizer`          apply_wd_to_qk_layernorm, decoupled_weight_decay: megatron-core's fields
    context/model.yaml, `optim`           no_weight_decay_cond, a function of NeMo 2; megatron-core's fields in `config`

`embedding_init_method_std` of a model's class, which Megatron-Bridge fills in always, is no such option.

Facts: megatron-core 0.13.1, 0.14.0, 0.15.3, 0.16.1 and 0.19.2, optimizer/__init__.py; Megatron-LM's
training/training.py; Megatron-Bridge's training/config.py; NeMo 2's lightning/pytorch/optim/megatron.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.checkpoint import Checkpoint
from formats.errors import UnsupportedError, short
from formats.megatron.args import run_config
from formats.megatron.args.versions import is_between, version_of
from formats.megatron.details import Megatron

EMBEDDING = "embedding_init_method_std"
EXCEPTIONS = ("apply_wd_to_qk_layernorm", "no_weight_decay_cond_type", "no_weight_decay_cond")
DECOUPLED = "decoupled_weight_decay"


def require_by_shape(source: Checkpoint) -> None:
    """Refuse a run in which other parameters decay than their shapes tell.

    Raises:
        SourceError: the file of Megatron-Bridge or NeMo is no YAML.
        UnsupportedError: an option makes an exception.
    """
    args, saved = source.details_of(Megatron).args, _saved_options(source)
    version = version_of(args)
    skips_embedding = is_between(version, "0.14", "0.15") if version else saved is None
    odd = {EMBEDDING: args.get(EMBEDDING)} if skips_embedding else {}
    for options in (args, saved or {}):
        odd |= {name: options[name] for name in EXCEPTIONS if options.get(name)}
    for name, value in odd.items():
        if value is not None:
            raise UnsupportedError(
                f"{source.home} was trained with {name} = {short(value)}: which of its parameters have weight decay is "
                "not told by their shapes then, and is not read",
                "convert the weights without --with-optimizer",
            )


def implied_settings(source: Checkpoint) -> Mapping[str, Any]:
    """Settings that hold for all parameter groups, and that no group has: whether weight decay is AdamW's."""
    of_run = source.details_of(Megatron).args, _saved_options(source) or {}
    said = [options[DECOUPLED] for options in of_run if DECOUPLED in options]
    return {DECOUPLED: all(said)} if said else {}


def _saved_options(source: Checkpoint) -> Mapping[str, Any] | None:
    """The options of the optimizer in the file of Megatron-Bridge or NeMo; None without such a file."""
    path = run_config.place(source.root, source.home)
    return run_config.optimizer_options(path) if path else None
