"""The options of a Megatron checkpoint to write, such as topology and names, and the args that record them."""

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
from formats.torch_files.pickle_values import DTYPES, Dtype, is_plain

CORE = "megatron-core"
"""The dialect of Megatron-LM's arguments, and of its classic files."""
DIST = "torch_dist"
"""The dialect of the same arguments in a distributed checkpoint (`megatron/torch_dist.py`)."""
FSDP_DTENSOR = "fsdp_dtensor"
"""The dialect of the same arguments in a checkpoint of Megatron-FSDP (`megatron/fsdp_dtensor.py`)."""
SAVED = {DIST: DIST, FSDP_DTENSOR: FSDP_DTENSOR}
"""`ckpt_format` by dialect; of other dialects it is `torch`."""


@dataclass(frozen=True)
class Options:
    """How a checkpoint is to be written.

    Attributes:
        tp: tensor parallel size.
        pp: pipeline parallel size.
        vpp: virtual pipeline chunks of each stage.
        norm: the names of the norms: `te` (Transformer Engine) or `local`.
        ep: expert parallel size.
        etp: tensor parallel size of an expert; None for `tp`.
        experts: the names of the experts: `te` (its grouped layers) or `local` (one by one); None for those of `norm`.
        vocab_multiple: the padded vocabulary is the next multiple of this times tp.
        dialect: `megatron-core`, `torch_dist`, `fsdp_dtensor` or `megatron-llm`.
        first_layers: layers of the first stage; None if it has as many as the others.
        last_layers: layers of the last stage; None if it has as many as the others.
        layout: the pipeline layout in Megatron's notation, such as `Et*3|(tt|)*29L`; must have pp * vpp entries.
        interleave: rows of the blocks in which gate and up of an expert alternate; 0 if all of gate is first.
        shared_interleave: rows of the blocks of shared experts, likewise.
        version: the Megatron-LM version that the flags are for; None for the newest that computes the model.
        accepted: deviations from the model that the user accepts (`versions.DEVIATIONS`).
        trainer: `bridge` for the files that Megatron-Bridge expects beside torch_dist; None for Megatron-LM alone.
        archive: whether all tensors are in one data file, whatever the topology; torch_dist and fsdp_dtensor alone.
        computed: torch's name of the element type of the training, if the weights are its FP32 master weights; else
            None.
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
        """How the layers are cut into stages."""
        return Pipeline(self.pp, self.vpp, self.first_layers, self.last_layers, layout=self.layout)

    @property
    def mesh(self) -> Mesh:
        """How the tensors of a pipeline stage are cut."""
        return Mesh(self.tp, self.ep, self.etp or self.tp, self.interleave, self.shared_interleave)


def main_dtype(dtypes: Iterable[str]) -> str:
    """The name in torch of the element type that most tensors have."""
    counted = list(dtypes)
    main = max(counted, key=counted.count)
    return next((name for name, dtype in DTYPES.items() if dtype == main), "float32")


def namespace(
    spec: ModelSpec, dtypes: Iterable[str], options: Options, padded: int, old: Mapping[str, Any], iteration: int | None
) -> dict[str, Any]:
    """The namespace that Megatron's loader reads (megatron/training/checkpointing.py `load_args_from_checkpoint`).

    Args:
        spec: the model.
        dtypes: the element types of its tensors.
        options: topology and dialect.
        padded: rows of the embedding.
        old: the args of the source; those that the model and the topology do not determine are kept.
        iteration: the iteration; None for a release.
    """
    carried = {name: value for name, value in old.items() if is_plain(name) and is_plain(value)}
    carried = {name: value for name, value in carried.items() if name not in FIELDS or not FIELDS[name].same}
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
    } | carried
    split = indexer.split(spec, options.tp)
    local = {"no_persist_layer_norm": True, "apply_rope_fusion": False} if options.norm == "local" else {}
    return base | to_megatron(spec) | moe.sizes(spec, options.mesh, options.experts or options.norm) | split | local | {
        "seq_length": carried.get("seq_length", spec.max_positions),
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
        "no_save_optim": True,  # so that no loader looks for optimizer states in a distributed checkpoint
        "no_save_rng": True,
    }  # fmt: skip
