"""The settings of a training run: one typed tree, with an explanation for every key.

`config_file.py` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from converters.common.hub_names import require_scheme

Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]

Tracker = Literal[
    "tensorboard", "wandb", "mlflow", "azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte",
    "kubeflow", "neptune", "swanlab", "trackio",
]  # fmt: skip
"""The trackers of transformers 5.23.0 (integrations/integration_utils.py)."""


def _listed(value: Any) -> Any:
    """The value as a list: a single string becomes a list of one."""
    return [value] if isinstance(value, str) else value


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_booleans(cls, data: Any) -> Any:
        """Refuse `true` where a number is expected: pydantic would make it 1."""
        for name, value in data.items() if isinstance(data, dict) else ():
            info = cls.model_fields.get(name)
            if isinstance(value, bool) and info is not None and info.annotation is not bool:
                raise ValueError(f"{name} is {str(value).lower()}, which is no value for it")
        return data

    @field_validator("*")
    @classmethod
    def _no_address(cls, value: Any) -> Any:
        """Refuse an address where a path is expected: it would be one of a folder `s3:`."""
        for path in value if isinstance(value, list) else value.values() if isinstance(value, dict) else [value]:
            if isinstance(path, Path):
                require_scheme(path, ())
        return value


class Model(_Part):
    """The model."""

    path: Path = Field(description="Checkpoint to start from, of any format; see `convert formats`.")
    init: Literal["checkpoint", "config"] = Field(
        "checkpoint", description="config: path is a Hugging Face folder, and the weights are random."
    )
    config: Path | None = Field(
        None, description="Hugging Face folder whose config and tokenizer are used if path has none."
    )
    tokenizer: Path | None = Field(
        None, description="Tokenizer file for a checkpoint that has none: a SentencePiece model, or tokenizer.json."
    )
    gqa_layout: Literal["auto", "blocked", "grouped"] = Field(
        "auto", description="Order of query, key and value in a GPT-NeoX checkpoint, as for `convert`."
    )
    dtype: Literal["bf16", "fp32"] = Field("bf16", description="Compute dtype; master weights are float32.")
    attention: Literal["auto", "flash", "varlen", "flex", "sdpa", "eager"] = Field(
        "auto",
        description="Kernel of attention, which keeps documents of a row apart; auto takes the fastest on the device.",
    )
    freeze: Annotated[list[str], BeforeValidator(_listed)] = Field(
        default_factory=list,
        description="Tensors that are not trained: shell patterns of their names; one that begins with ! unfreezes.",
    )
    activation_checkpointing: bool = Field(True, description="Recompute layers in the backward pass.")
    activation_offload: bool = Field(
        False, description="Keep the inputs of layers in CPU memory until the backward pass."
    )
    compile: bool = Field(False, description="Compile each layer with torch.compile, once for all sizes of rows.")
    kernels: Literal["auto", "torch", "liger"] = Field(
        "auto",
        description="Kernels of norms, MLPs and RoPE; auto takes liger on a GPU if it has the model, without compile.",
    )


class Lora(_Part):
    """LoRA: adapters are trained, the model's own weights are frozen."""

    rank: Count = Field(16, description="Number of columns of B and rows of A.")
    alpha: Count = Field(32, description="B times A is scaled by alpha / rank.")
    rslora: bool = Field(False, description="rsLoRA: scale by alpha / sqrt(rank) instead.")
    dora: bool = Field(False, description="DoRA: the norms of the rows of each weight are trained too.")
    quantize: Literal["none", "nf4"] = Field(
        "none", description="QLoRA: nf4 keeps the frozen weights of layers in 4 bits, all of them on each rank."
    )
    adapter: Path | None = Field(
        None, description="Folder of a PEFT adapter to start from; the other settings are then those of the folder."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Dropout on the input of A.")
    targets: Annotated[list[str], Field(min_length=1), BeforeValidator(_listed)] = Field(
        ["all-linear"], description="Names of layers, such as q_proj; all-linear takes all of them but the head."
    )

    @property
    def everywhere(self) -> bool:
        """Whether every linear layer but the head has an adapter."""
        return self.targets == ["all-linear"]


class Data(_Part):
    """The data."""

    train: Annotated[list[Path], BeforeValidator(_listed)] = Field(
        min_length=1,
        description="Token files, named without .bin (train tokenize), or plans of rows of them (train pack).",
    )
    validation: dict[str, Path] = Field(
        default_factory=dict,
        description="Validation set by name, each evaluated separately; for a plan, its split of that name is taken.",
    )
    weights: list[Annotated[float, Field(gt=0)]] = Field(
        default_factory=list,
        description="Share of each set of data.train in the rows.  [default: in proportion to its rows]",
    )
    temperature: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Shares are raised to 1/temperature: a temperature above 1 gives small sets more rows."
    )
    epochs: list[Annotated[float, Field(gt=0)]] = Field(
        default_factory=list, description="Passes over each set of data.train, instead of steps.epochs."
    )
    seq_length: Count = Field(description="Number of input tokens in a row.")
    packing: Literal["bfd", "k_bin", "overflow", "packed"] | None = Field(
        None, description="How documents are packed into rows; see train pack.  [default: bfd, or that of a plan]"
    )
    overlong: Literal["drop", "error", "truncate"] | None = Field(
        None,
        description="What is done with documents longer than a row.  [default: drop; packed cuts over rows]",
    )
    loss: Literal["assistant", "last_turn", "all"] = Field(
        "assistant", description="Labels that are trained: of assistant turns, of the last one, or all."
    )
    control_tokens: dict[str, int] = Field(
        default_factory=dict,
        description="Token id of each role, such as {user: 7, assistant: 8}, for files that do not record them.",
    )


class Batch(_Part):
    """Rows of a step. Two of the three give the third, with the number of ranks."""

    micro: Count | None = Field(None, description="Number of rows in a micro-batch of a rank.")
    size: Count | None = Field(None, description="Number of rows in a step, over all ranks.")
    accumulation: Count | None = Field(None, description="Number of micro-batches in a step.")


class Optim(_Part):
    """AdamW."""

    lr: Annotated[float, Field(gt=0)] = Field(description="Peak learning rate.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95))
    eps: Annotated[float, Field(gt=0)] = Field(1e-8)
    moments: Literal["fp32", "8bit"] = Field(
        "fp32", description="Element type of the moments; 8bit is bitsandbytes' quantization."
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Weight decay of matrices; norms and biases have none."
    )
    clip: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Norm to which gradients are clipped; 0 does not clip."
    )


class Schedule(_Part):
    """The learning rate. Warm-up counts steps of this run, everything else the run's global step."""

    style: Literal["constant", "linear", "cosine", "exponential", "sqrt"] = Field("cosine")
    warmup: Annotated[float, Field(ge=0)] | Literal["all"] = Field(
        0.0, description="Number of warm-up steps, or their share of all steps if below 1."
    )
    min_lr: Annotated[float, Field(ge=0)] = Field(0.0, description="Learning rate at the end of the decay.")
    floor: Annotated[float, Field(ge=0)] = Field(0.0, description="Lower bound of the rate after the warm-up.")
    start: int | None = Field(None, description="Global step where the decay begins.  [default: the run's first]")
    end: int | None = Field(None, description="Global step where the decay ends.  [default: the run's last]")


class Steps(_Part):
    """How long, and how steps are numbered."""

    train_iters: Count | None = Field(None, description="Number of steps of this run; otherwise give epochs.")
    epochs: Annotated[float, Field(gt=0)] | None = Field(None, description="Number of passes over the rows.")
    iteration_offset: Annotated[int, Field(ge=0)] = Field(0, description="Global step of the checkpoint to start from.")
    exit_interval: Count | None = Field(None, description="Save and exit every so many steps; the next job resumes.")
    exit_minutes: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Save and exit so many minutes after the process started; saving takes extra time."
    )


class Save(_Part):
    """Checkpoints."""

    path: Path = Field(description="Folder of the run's checkpoints.")
    every: Count = Field(100, description="Number of steps between two checkpoints.")
    every_minutes: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Save also when so many minutes have passed since the last checkpoint."
    )
    keep: Count | None = Field(
        None, description="Number of checkpoints to keep; None keeps all. The start is never deleted."
    )


class Parallel(_Part):
    """How the model is sharded over ranks."""

    replicas: Count = Field(1, description="HSDP: copies of the sharded model; the world is replicas times shards.")
    offload: bool = Field(False, description="FSDP: shards, gradients and moments in CPU memory, where AdamW runs.")
    reshard: bool = Field(
        True,
        description="FSDP: free gathered weights after each layer; false: after each step, for 2 bytes a weight.",
    )
    context: Count = Field(1, description="Context parallelism: ranks that share each row, for long documents.")
    tensor: Count = Field(1, description="Tensor parallelism: ranks that each compute a part of every layer.")
    zero_stage: Literal[1, 2, 3] = Field(
        3, description="ZeRO: 1 shards the moments, 2 the gradients too, 3 the weights too."
    )
    deepspeed: dict[str, Any] = Field(
        default_factory=dict, description="Further settings of DeepSpeed, such as zero_optimization.offload_optimizer."
    )
    timeout_minutes: Annotated[float, Field(gt=0)] = Field(
        30, description="Collective timeout: a rank that waits longer dumps its stacks and exits."
    )


class Evaluate(_Part):
    """Evaluation of the validation sets, beside their perplexity."""

    every: Count | None = Field(None, description="Number of steps between two evaluations.  [default: save.every]")
    metrics: list[Literal["rouge", "bleu"]] = Field(
        default_factory=list,
        description="Metrics of the text of the most likely next tokens; they need the model's tokenizer.",
    )
    max_rows: Count | None = Field(
        None, description="Number of rows of each set, evenly spread over the set.  [default: all]"
    )
    tokenizer: Path | None = Field(None, description="Tokenizer file.  [default: that of the model folder]")
    best: str | None = Field(
        None,
        description="Set or metric, such as eu or eu_bleu, whose best checkpoint is kept, and exported.",
    )
    patience: Count | None = Field(
        None, description="End the training after so many evaluations in a row without improvement."
    )
    min_delta: Annotated[float, Field(ge=0)] = Field(
        0.0, description="How much better than the best an evaluation has to be to count as improvement."
    )
    prompts: Annotated[list[str], BeforeValidator(_listed)] = Field(
        default_factory=list,
        description="Prompts that are answered at each evaluation; the answers are written to generations.jsonl.",
    )
    new_tokens: Count = Field(64, description="Largest number of tokens in an answer to a prompt.")


class Log(_Part):
    """Logs."""

    every: Count = Field(1, description="Number of steps between two printed lines.")
    trackers: list[Tracker] = Field(
        default_factory=list,
        description="Trackers of the curves; tensorboard, wandb and mlflow continue them when the run resumes.",
    )
    layer_norms: bool = Field(False, description="Log the gradient norm of each layer too.")
    spike: Annotated[float, Field(gt=0)] | None = Field(
        6.0, description="Print a note if a loss is so many standard deviations above the mean of the last 50 steps."
    )


class Profile(_Part):
    """Profiling."""

    kind: Literal["trace", "flops"] | None = Field(
        None,
        description="trace: a trace of torch's profiler in save.path/profiler; flops: torch's count of operations.",
    )
    after: Annotated[int, Field(ge=0)] = Field(3, description="Number of steps of a job before profiling starts.")
    steps: Count = Field(1, description="Number of steps to profile.")


class Config(_Part):
    """A training run."""

    model: Model
    engine: Literal["fsdp", "transformers", "deepspeed"] = Field(
        "fsdp", description="Engine: torch's FSDP2, the Trainer of transformers, or DeepSpeed's ZeRO."
    )
    lora: Lora | None = Field(None, description="Train LoRA adapters; `lora: {}` takes the defaults.")
    data: Data
    batch: Batch
    optim: Optim
    schedule: Schedule = Schedule()  # type: ignore[call-arg]
    steps: Steps = Steps()  # type: ignore[call-arg]
    save: Save
    parallel: Parallel = Parallel()  # type: ignore[call-arg]
    evaluate: Evaluate = Evaluate()  # type: ignore[call-arg]
    log: Log = Log()  # type: ignore[call-arg]
    profile: Profile = Profile()  # type: ignore[call-arg]
    seed: Annotated[int, Field(ge=0)] = Field(1234, description="Seed of the order of rows, of packing and of noise.")
    init: Literal["auto", "finetune", "moments", "resume"] = Field(
        "auto",
        description="All resume from a checkpoint of this run. Without one, resume is an error, and the others start a "
        "new run: finetune without the moments of the previous phase, moments with those of model.path.",
    )
    neftune_alpha: Annotated[float, Field(ge=0)] = Field(
        0.0, description="NEFTune: scale of the noise on embeddings; 0 is none."
    )
    export: Path | None = Field(None, description="Hugging Face folder to which the model is exported at the end.")
    chat_template: str | None = Field(
        None, description="Name or file of the exported chat template.  [default: the start's, if it has one]"
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def remember(self, notes: Iterable[str]) -> None:
        """Store which GPT-NeoX keys became which settings, from the notes of `load_config`."""
        self._origins.update((match[2], match[1]) for note in notes if (match := ORIGIN.fullmatch(note)))

    def called(self, name: str) -> str:
        """The name of a setting in the user's file, with our name in parentheses if it was a GPT-NeoX key."""
        if name in self._origins:
            return f"{self._origins[name]} ({name})"
        section, _, last = name.rpartition(".")
        return f"{self._origins[section]}.params.{last} ({name})" if section in self._origins else name


ORIGIN = re.compile(r"(?!no )([\w ,.-]+?) -> ([\w.]+)(?:: .*)?")
"""Matches a note on a GPT-NeoX key that became a setting; the groups are the key and the setting."""


def keys(part: type[BaseModel] = Config, prefix: str = "") -> dict[str, str]:
    """The description of every setting by its dotted name, in the order of the file."""
    descriptions: dict[str, str] = {}
    for name, info in part.model_fields.items():
        kind = next((argument for argument in get_args(info.annotation) if isinstance(argument, type)), info.annotation)
        if isinstance(kind, type(BaseModel)):  # in Python 3.10 list[str] is a type too, without subclasses
            descriptions |= keys(kind, f"{prefix}{name}.")
        else:
            descriptions[prefix + name] = info.description or ""
    return descriptions


def flat(config: Config) -> Mapping[str, Any]:
    """The value of every setting by its dotted name."""

    def walk(value: Any, prefix: str) -> Iterable[tuple[str, Any]]:
        for name, inner in value:
            if isinstance(inner, BaseModel):
                yield from walk(inner, f"{prefix}{name}.")
            else:
                yield prefix + name, inner

    return dict(walk(config, ""))
