"""The settings of a training: one tree, typed, with an explanation for every key.

A YAML file gives it, upon another one if it names a `base`; dotted words on the command line override it (`--optim.lr
1e-5`). Unknown keys are errors that name the nearest known one. Keys of the users' GPT-NeoX files are understood, see
`neox_keys.py`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from formats.errors import UsageError
from train.settings.neox_keys import Notes, completed, get, put, translated

Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]

QUANTIZED = "1, 2, 3, 5, 8, 16, 32, 40, 64 and 80"
"""Numbers of nodes for ZeRO++'s quantized gradients, as the users of it found them."""


def _listed(value: Any) -> Any:
    """A list, of one thing too."""
    return [value] if isinstance(value, str) else value


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_booleans(cls, data: Any) -> Any:
        """Refuse `true` where a number belongs: it would be 1."""
        for name, value in data.items() if isinstance(data, dict) else ():
            info = cls.model_fields.get(name)
            if isinstance(value, bool) and info is not None and info.annotation is not bool:
                raise ValueError(f"{name} is {str(value).lower()}, which is no value for it")
        return data


class Model(_Part):
    """What is trained."""

    path: Path = Field(description="Checkpoint to start from, of any format; see `convert formats`.")
    config: Path | None = Field(None, description="Hugging Face folder with the settings and tokenizer it lacks.")
    tokenizer: Path | None = Field(
        None, description="File of the tokenizer, for a checkpoint without: of SentencePiece, or tokenizer.json."
    )
    gqa_layout: Literal["auto", "blocked", "grouped"] = Field(
        "auto", description="Order of query, key and value in a checkpoint of GPT-NeoX, as of `convert`."
    )
    dtype: Literal["bf16", "fp32"] = Field("bf16", description="Type of the computation; weights to step are float32.")
    attention: Literal["auto", "flash", "varlen", "flex", "sdpa", "eager"] = Field(
        "auto", description="How documents of a row are kept apart; auto takes the fastest that the device has."
    )
    activation_checkpointing: bool = Field(True, description="Compute each layer twice instead of keeping it.")
    compile: bool = Field(False, description="torch.compile for each layer.")
    kernels: Literal["auto", "torch", "liger"] = Field(
        "auto", description="Of norms, MLPs and positions; auto takes liger on a GPU where it knows the model."
    )


class Lora(_Part):
    """Adapters of low rank are trained, the model's own weights are not."""

    rank: Count = Field(16, description="Columns of B and rows of A.")
    alpha: Count = Field(32, description="B times A counts alpha / rank.")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Of what goes into A.")
    targets: Annotated[list[str], Field(min_length=1), BeforeValidator(_listed)] = Field(
        ["all-linear"], description="Names of layers, such as q_proj; all-linear takes all of them but the head."
    )

    @property
    def everywhere(self) -> bool:
        """Whether every linear layer but the head has an adapter."""
        return self.targets == ["all-linear"]


class Data(_Part):
    """What it is trained on."""

    train: Annotated[list[Path], BeforeValidator(_listed)] = Field(
        min_length=1, description="Token files, without .bin (train tokenize); or plans of them (train pack)."
    )
    validation: dict[str, Path] = Field(
        default_factory=dict, description="Named sets, each evaluated by itself; of a plan the split of that name."
    )
    seq_length: Count = Field(description="Tokens that a step sees of a row.")
    packing: Literal["bfd", "k_bin", "overflow", "packed"] = Field("bfd", description="See train pack.")
    overlong: Literal["drop", "error", "truncate"] = Field("drop", description="Documents longer than a row.")
    loss: Literal["assistant", "last_turn", "all"] = Field("assistant", description="Which labels are trained.")
    control_tokens: dict[str, int] = Field(
        default_factory=dict, description="Role: id, such as {user: 7, assistant: 8}, for files that do not tell them."
    )


class Batch(_Part):
    """Rows of a step. Two of the three give the third, with the number of ranks."""

    micro: Count | None = Field(None, description="Rows that a rank computes at a time.")
    size: Count | None = Field(None, description="Rows of a step, over all ranks.")
    accumulation: Count | None = Field(None, description="Micro-batches of a step.")


class Optim(_Part):
    """AdamW."""

    lr: Annotated[float, Field(gt=0)] = Field(description="The highest learning rate.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95))
    eps: Annotated[float, Field(gt=0)] = Field(1e-8)
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="For matrices; norms and biases have none.")
    clip: Annotated[float, Field(ge=0)] = Field(1.0, description="Largest norm of the gradient; 0 does not clip.")


class Schedule(_Part):
    """The learning rate. Warm-up counts steps of this run, everything else the run's global step."""

    style: Literal["constant", "linear", "cosine", "exponential", "sqrt"] = Field("cosine")
    warmup: Annotated[float, Field(ge=0)] | Literal["all"] = Field(
        0.0, description="Steps, or a share of them if below 1."
    )
    min_lr: Annotated[float, Field(ge=0)] = Field(0.0, description="Where it ends.")
    floor: Annotated[float, Field(ge=0)] = Field(0.0, description="No rate behind the warm-up is lower.")
    start: int | None = Field(None, description="Global step where the decay begins.  [default: the run's first]")
    end: int | None = Field(None, description="Global step where it ends.  [default: the run's last]")


class Steps(_Part):
    """How long, and how steps are numbered."""

    train_iters: Count | None = Field(None, description="Steps of this run; or give epochs.")
    epochs: Annotated[float, Field(gt=0)] | None = Field(None, description="Passes over the rows.")
    iteration_offset: Annotated[int, Field(ge=0)] = Field(0, description="Global step of the checkpoint to start from.")
    exit_interval: Count | None = Field(None, description="Save and end after so many steps; the next job goes on.")
    exit_minutes: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Likewise so long after it began to load; what is saved then takes more."
    )


class Save(_Part):
    """Checkpoints."""

    path: Path = Field(description="Folder of the run's checkpoints.")
    every: Count = Field(100, description="Steps between two checkpoints.")
    every_minutes: Annotated[float, Field(gt=0)] | None = Field(
        None, description="One more where so much time has passed since the last."
    )
    keep: Count | None = Field(None, description="How many stay; None keeps all. The start is never deleted.")


class Parallel(_Part):
    """How ranks share the model."""

    replicas: Count = Field(1, description="HSDP: copies of the sharded model; the world is replicas times shards.")
    zero_stage: Literal[1, 2, 3] = Field(
        3, description="ZeRO: each rank has a part of the moments (1), the gradients too (2), the weights too (3)."
    )
    deepspeed: dict[str, Any] = Field(
        default_factory=dict, description="More settings of DeepSpeed, such as zero_optimization.offload_optimizer."
    )
    timeout_minutes: Annotated[float, Field(gt=0)] = Field(
        30, description="A rank that waits longer for the others tells where it waits, and ends."
    )


class Evaluate(_Part):
    """What is found out about the validation sets, beside their perplexity."""

    every: Count | None = Field(None, description="Steps between two evaluations.  [default: save.every]")
    metrics: list[Literal["rouge", "bleu"]] = Field(
        default_factory=list, description="Of the likeliest next tokens, as text; needs the model's tokenizer."
    )
    max_rows: Count | None = Field(None, description="Rows of each set, evenly spread.  [default: all]")
    tokenizer: Path | None = Field(None, description="File of the tokenizer.  [default: that of the model's folder]")


class Log(_Part):
    """What is written down."""

    every: Count = Field(1, description="Steps between two lines.")
    trackers: list[Literal["tensorboard", "wandb"]] = Field(
        default_factory=list, description="Where curves go besides log.jsonl; a resumed run continues them."
    )


class Profile(_Part):
    """Where the time of a step goes."""

    kind: Literal["trace", "flops"] | None = Field(
        None, description="trace: of torch's profiler, into save.path/profiler; flops: torch's count of operations."
    )
    after: Annotated[int, Field(ge=0)] = Field(3, description="Steps of a job that are not watched.")
    steps: Count = Field(1, description="Steps that are.")


class Config(_Part):
    """A training."""

    model: Model
    engine: Literal["fsdp", "transformers", "deepspeed"] = Field(
        "fsdp", description="What computes: torch's FSDP2, the Trainer of transformers, or DeepSpeed's ZeRO."
    )
    lora: Lora | None = Field(None, description="Train adapters of low rank; `lora: {}` takes the defaults.")
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
    seed: Annotated[int, Field(ge=0)] = Field(1234, description="Of the order of rows, of packing and of noise.")
    init: Literal["auto", "finetune", "resume"] = Field(
        "auto",
        description="All go on from a checkpoint of this run; if there is none, auto and finetune begin, "
        "finetune without the moments of the phase before, and resume refuses.",
    )
    neftune_alpha: Annotated[float, Field(ge=0)] = Field(0.0, description="Noise on embeddings, for each document.")
    export: Path | None = Field(None, description="Hugging Face folder that is written at the end.")
    chat_template: str | None = Field(
        None, description="Name or file of its chat template; else it has the start's, if that has one."
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def remember(self, notes: Iterable[str]) -> None:
        """Keep which keys of GPT-NeoX became which settings, as notes tell."""
        self._origins.update((found[2], found[1]) for note in notes if (found := ORIGIN.fullmatch(note)))

    def called(self, name: str) -> str:
        """A setting by the name that the user has given it, in a file of GPT-NeoX too."""
        if name in self._origins:
            return f"{self._origins[name]} ({name})"
        section, _, last = name.rpartition(".")
        return f"{self._origins[section]}.params.{last} ({name})" if section in self._origins else name


ORIGIN = re.compile(r"(?!no )([\w ,.-]+?) -> ([\w.]+)(?:: .*)?")
"""A note of a key of GPT-NeoX that became a setting: the key and the setting."""


def load_config(path: Path, overrides: Iterable[str] = ()) -> tuple[Config, list[str]]:
    """Read settings.

    Args:
        path: a YAML file.
        overrides: `--optim.lr`, `1e-5`, `--model.compile=true`, ….

    Returns:
        The settings, and lines about keys of GPT-NeoX: what they became, and its defaults for those that are not there.

    Raises:
        UsageError: a key is unknown, or a value is wrong.
    """
    tree, translations = _tree(path)
    words = dict(_words(overrides))
    for name, value in words.items():
        put(tree, name, value, f"--{name}")
    notes = [told + _overridden(ours, words) for ours, told in translations]
    notes += completed(tree, str(path))
    try:
        config = Config(**tree)
    except ValidationError as error:
        raise UsageError(*_explained(error, str(path))) from None
    config.remember(notes)
    _check_engine(config)
    if "zero_quantized_gradients" in config.parallel.deepspeed.get("zero_optimization", {}):
        notes.append(f"zero_quantized_gradients (qgZ) is known to work on {QUANTIZED} nodes")
    return config, notes


def _tree(path: Path, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], Notes]:
    """What a file says, upon what its `base` says, and the notes of both.

    Args:
        path: the file.
        above: those that it is the base of.
    """
    held = _read(path)
    base = held.pop("base", None)
    tree, notes = translated(held, str(path))
    if base is None:
        return tree, notes
    if not isinstance(base, str):
        raise UsageError(f"{path}: base is {base!r}", "it is one file of settings, which may have a base itself")
    chain = (*above, path.resolve())
    if (path.parent / base).resolve() in chain:
        raise UsageError(f"{path}: its base {base} is a file that it is the base of")
    under, more = _tree(path.parent / base, chain)
    return _upon(under, tree), [note for note in more if not _says(tree, note[0])] + notes


def _says(tree: Any, name: str) -> bool:
    """Whether settings give a value to one of them."""
    value = get(tree, name)
    return value is not None and not isinstance(value, Mapping)


def _upon(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Settings upon others: sections are joined, everything else is replaced."""
    joined = {
        name: _upon(under[name], value)
        for name, value in over.items()
        if isinstance(value, Mapping) and isinstance(under.get(name), Mapping)
    }
    return {**under, **over, **joined}


def _read(path: Path) -> dict[str, Any]:
    """What stands in a file; what is empty there is left out."""
    try:
        held = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
        _require_once(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        hint = f"iconv -f UTF-16 -t UTF-8 {path} > utf8.yml, if it is UTF-16"
        raise UsageError(f"{path} is not UTF-8: byte {error.start} cannot be read", hint) from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(held, dict):
        raise UsageError(f"{path} is no list of settings")
    if "lora" in held and held["lora"] is None:
        raise UsageError(f"{path}: lora is empty", "lora: {} takes the defaults; without it all weights are trained")
    return {name: value for name, value in held.items() if value is not None}


def _overridden(name: str, words: Mapping[str, Any]) -> str:
    """What the command line says instead of a setting, or of settings in it."""
    said = [f"--{word} {value}" for word, value in words.items() if name and f"{word}.".startswith(f"{name}.")]
    return f"; but {', '.join(said)}" if said else ""


def _check_engine(config: Config) -> None:
    """Refuse settings that only another engine has."""
    replicas, compiled = {"parallel.replicas": config.parallel.replicas > 1}, {"model.compile": config.model.compile}
    zero = {"parallel.deepspeed": bool(config.parallel.deepspeed)}
    ours = replicas | compiled | {"lora": config.lora is not None, "model.kernels": config.model.kernels == "liger"}
    foreign = {"fsdp": zero, "transformers": ours | zero, "deepspeed": ours}
    for name, given in foreign[config.engine].items():
        if given:
            raise UsageError(f"the engine {config.engine} does not know {name}", described(name))


def _require_once(path: Path) -> None:
    """Refuse a section or setting that stands twice: YAML takes the last, without a word."""

    def walk(node: Any) -> None:
        if isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                if key.value in lines:
                    told = f"in lines {lines[key.value]} and {key.start_mark.line + 1}"
                    raise UsageError(f"{path}: {key.value} stands twice, {told}")
                lines[key.value] = key.start_mark.line + 1
                walk(value)

    walk(yaml.compose(path.read_text(), yaml.SafeLoader))


def _words(overrides: Iterable[str]) -> Iterable[tuple[str, Any]]:
    words = list(overrides)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise UsageError(f"{word} is no setting such as --optim.lr 1e-5")
        name, equals, value = word[2:].partition("=")
        if not equals:
            if not words:
                raise UsageError(f"--{name} has no value")
            value = words.pop(0)
        free = name.startswith("data.validation.")  # a set's own name
        yield name if free else name.replace("-", "_"), _value(value)


def _value(text: str) -> Any:
    """A value as YAML reads it; `1e-5` is a number too, which YAML takes for a text."""
    try:
        return float(text) if text.lower().lstrip("+-")[:1].isdigit() and "e" in text.lower() else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return text


def _explained(error: ValidationError, path: str) -> tuple[str, str]:
    """The first fault as a sentence, or all unknown keys, and the nearest known ones as a hint."""
    faults = error.errors()
    unknown = [".".join(map(str, one["loc"])) for one in faults if one["type"] == "extra_forbidden"]
    if unknown:  # what is misspelled is missing too
        many = f" ({len(faults) - len(unknown)} more)" if len(faults) > len(unknown) else ""
        near = [found for found in map(nearest, unknown) if found]
        told = f"{', '.join(unknown)} {'are no settings' if len(unknown) > 1 else 'is no setting'}"
        known = ", ".join(key for key in keys() if key.startswith(unknown[0].partition(".")[0] + "."))
        others = f"there are {known}" if known else "`train init` writes a file with every setting"
        return f"{path}: {told}{many}", f"did you mean {', '.join(dict.fromkeys(near))}?" if near else others
    fault = faults[0]
    where = re.sub(r"\.(constrained-float|literal\[.*\])$", "", ".".join(map(str, fault["loc"])))  # of a union
    more = f" ({len(faults) - 1} more)" if len(faults) > 1 else ""
    if fault["type"] == "missing":
        lacking = [".".join(map(str, one["loc"])) for one in faults if one["type"] == "missing"]
        more = f" ({len(faults) - len(lacking)} more)" if len(faults) > len(lacking) else ""
        return f"{path}: {', '.join(lacking)} {'are' if len(lacking) > 1 else 'is'} missing{more}", described(where)
    return f"{path}: {where} is {fault['input']!r}: {fault['msg']}{more}", described(where)


def keys(part: type[BaseModel] = Config, prefix: str = "") -> dict[str, str]:
    """Every setting with its explanation, in the order of the file."""
    found: dict[str, str] = {}
    for name, info in part.model_fields.items():
        kind = next((one for one in get_args(info.annotation) if isinstance(one, type)), info.annotation)
        if isinstance(kind, type(BaseModel)):  # in Python 3.10 list[str] is a type too, without subclasses
            found |= keys(kind, f"{prefix}{name}.")
        else:
            found[prefix + name] = info.description or ""
    return found


def nearest(name: str) -> str:
    """The known setting whose name is nearest, empty if none is near."""
    known = list(keys())
    last = {key.rpartition(".")[2]: key for key in known}
    found = difflib.get_close_matches(name, known, 1, 0.6)
    return found[0] if found else last.get((difflib.get_close_matches(name.rpartition(".")[2], last, 1) or [""])[0], "")


def described(name: str) -> str:
    """What a setting means."""
    return keys().get(name, "")


def flat(config: Config) -> Mapping[str, Any]:
    """Every setting by its dotted name."""

    def walk(value: Any, prefix: str) -> Iterable[tuple[str, Any]]:
        for name, held in value:
            if isinstance(held, BaseModel):
                yield from walk(held, f"{prefix}{name}.")
            else:
                yield prefix + name, held

    return dict(walk(config, ""))
