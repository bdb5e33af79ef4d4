"""How a Megatron checkpoint is written: its topology and names, and the arguments that say so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from formats.megatron.args import indexer, moe
from formats.megatron.args.args import to_megatron
from formats.megatron.args.fields import ASSUMED, FIELDS
from formats.megatron.mesh import Mesh
from formats.megatron.pipeline import Pipeline
from formats.model.spec import ModelSpec
from formats.torch_files.pickle_values import DTYPES, Dtype, keeps

CORE = "megatron-core"
"""The dialect of Megatron-LM's arguments, and of its classic files."""
DIST = "torch_dist"
"""The same arguments, in a distributed checkpoint (`megatron/torch_dist.py`)."""
FSDP_DTENSOR = "fsdp_dtensor"
"""The same, in one of Megatron-FSDP (`megatron/fsdp_dtensor.py`)."""
SAVED = {DIST: DIST, FSDP_DTENSOR: FSDP_DTENSOR}
"""`ckpt_format` by dialect, of those that are not `torch`."""


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
        dialect: `megatron-core`, `torch_dist`, `fsdp_dtensor` or `megatron-llm`.
        first_layers: layers of the first stage, where it has not as many as the others.
        last_layers: the same for the last stage.
        layout: the pipeline in Megatron's words, such as `Et*3|(tt|)*29L`; it must have pp * vpp entries.
        interleave: rows of gate, then of up, that alternate in an expert; 0 where all of gate is first.
        shared_interleave: the same of shared experts.
        version: the Megatron-LM that the flags are for; None for the newest that computes the model.
        accepted: deviations from the model that the user named (`versions.DEVIATIONS`).
        trainer: `bridge` for what Megatron-Bridge expects beside torch_dist; None for Megatron-LM alone.
        archive: all tensors in one data file, whatever topology it is cut for; torch_dist and fsdp_dtensor alone.
        computed: the element type of the training, as torch calls it, where the weights are its master weights.
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
    trainer: str | None = None
    archive: bool = False
    computed: str | None = None

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
    torch_name = options.computed or main_dtype(dtypes)
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
    split = indexer.split(spec, options.tp)
    return base | to_megatron(spec) | moe.sizes(spec, options.mesh, options.experts or options.norm) | split | {
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
        "ckpt_format": SAVED.get(options.dialect, "torch"),
        "use_megatron_fsdp": options.dialect == FSDP_DTENSOR,
        "use_custom_fsdp": options.dialect == FSDP_DTENSOR,
        "use_legacy_models": False,
        "no_save_optim": True,  # so that nobody looks for them in a distributed checkpoint
        "no_save_rng": True,
    }  # fmt: skip
