"""Check that the parts of a GPT-NeoX checkpoint agree: the seeds of its ranks, its yml and its config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from formats.checkpoint import Settings
from formats.deepspeed.neox.run_keys import require_known
from formats.deepspeed.neox.yml_file import config_of
from formats.disk.safetensors import read_bytes
from formats.errors import OptionNeededError, SourceError, short, some
from formats.model.checks import require_same_settings
from formats.model.spec import ModelSpec
from formats.torch_files.archive import TorchFile
from formats.torch_files.pickle_values import TensorRef

NOTED = {
    "num_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads",
    "max_position_embeddings": "max_positions",
}  # fmt: skip
"""The setting by key of the yml, for keys that NeoX stores with the weights too (checkpointing.py
`check_checkpoint_args`)."""


def require_own_seeds(models: Mapping[int, TorchFile], tp: int) -> None:
    """Refuse files whose seeds are those of other ranks.

    The random state of a rank begins with its seed, a common number plus the tensor parallel rank (mpu/random.py).

    Raises:
        SourceError: the seeds are those of other ranks: files were mixed up.
    """
    seeds = []
    for file in models.values():
        states = file.value.get("rng_tracker_states")
        ref = states.get("model-parallel-rng") if isinstance(states, Mapping) else None
        if not isinstance(ref, TensorRef) or ref.dtype != "U8" or not ref.shape or ref.shape[0] < 8:
            return
        begin = file.fragment(ref, "model-parallel-rng").offset
        seeds.append(int.from_bytes(read_bytes(file.path, begin, 8), "little"))
    expected = [min(seeds) + rank % tp for rank in models]
    if sorted(seeds) == sorted(expected) and seeds != expected:
        rank = next(rank for rank, seed in zip(models, seeds, strict=True) if seed != min(seeds) + rank % tp)
        raise SourceError(
            f"{models[rank].path} was saved by tensor parallel rank {seeds[rank] - min(seeds)}: files are mixed up",
            "copy the files of all ranks again, each under its own name",
        )


def require_same_model(
    models: Mapping[int, TorchFile], config: Mapping[str, Any], settings: Settings, where: str, tp: int
) -> None:
    """Refuse a yml that contradicts the args that NeoX stored with the weights, apart from settings that the user set.

    Raises:
        SourceError: the two contradict each other, or the args have another tensor parallel size than the files.
    """
    for file in models.values():
        args = file.value.get("args")
        saved_args = dict(args) if isinstance(args, Mapping) else {}
        for name, setting in NOTED.items():
            decided = setting in settings.values
            if not decided and name in saved_args and name in config and saved_args[name] != config[name]:
                raise SourceError(
                    f"{where} says {name} = {short(config[name])}, {file.path} {short(saved_args[name])}",
                    f"it is the yml of another model, or decide with --set {setting}=VALUE",
                )
        ranks = saved_args.get("model_parallel_size", tp)
        if ranks != tp:
            raise SourceError(f"{file.path} was saved with model_parallel_size {short(ranks)}, {tp} ranks are there")


def require_same_topology(
    models: Mapping[int, TorchFile], config: Mapping[str, Any], where: str, tp: int, *, layered: bool
) -> list[str]:
    """Compare the parallel sizes of the yml with the number of files; sizes that each file records overrule the yml.

    Returns:
        Notes for the user on differences.

    Raises:
        SourceError: the sizes differ, and the files do not record them.
    """
    notes = []
    pp = len(models) // tp
    for name, ranks in (("model_parallel_size", tp), ("pipe_parallel_size", pp)):
        configured = config.get(name, ranks)
        if configured == ranks or (name == "pipe_parallel_size" and configured in (0, 1) and ranks == 1):
            continue
        difference = f"{where} says {name} = {short(configured)}, the files are of {ranks}"
        if not all(_says_topology(file.value, layered=layered) for file in models.values()):
            raise SourceError(difference, "ranks are missing, or it is the yml of another run: name one with --config")
        notes.append(f"{difference}, as they say themselves")
    return notes


BIASES = {"use_bias_in_attn_linear": r"attention\..*\.bias", "use_bias_in_mlp": r"mlp\..*\.bias"}
"""Key of a yml, true where it is absent: the biases without which a model is where it is false."""


def require_same_biases(keys: Iterable[str], config: Mapping[str, Any], where: str, tag: Path) -> bool:
    """The weights have biases where the yml says so. Returns whether attention has some.

    An MLP that is gated has none whatever the yml says (megatron/model/transformer.py `LLaMAParallelMLP`).

    Raises:
        SourceError: they differ.
    """
    biases = {option: sorted(key for key in keys if re.search(f"{key_of}$", key)) for option, key_of in BIASES.items()}
    attention = next(iter(BIASES))
    for option, bias_keys in biases.items():
        flag = config.get(option, True)
        if flag is not bool(bias_keys) and (bias_keys or option == attention):
            amount = f"such biases: {some(bias_keys, 3)}" if bias_keys else "no such biases"
            reason = f"{where} says {option} = {flag}, {tag} holds {amount}"
            raise SourceError(reason, "it is the yml of another model")
    return bool(biases[attention])


def _says_topology(state: Mapping[str, Any], *, layered: bool) -> bool:
    """Whether a model file records the number of ranks; in a pipeline also that of tensor parallel ranks."""
    args = state.get("args")
    return "mp_world_size" in state and (not layered or (isinstance(args, Mapping) and "model_parallel_size" in args))


def require_same_config(spec: ModelSpec, base: ModelSpec, settings: Settings, where: str) -> None:
    """Refuse a config.json of Hugging Face that describes another model than the yml of a checkpoint.

    The window of the config may be a token narrower: the scripts of GPT-NeoX copy the number, with which a token sees
    one more token in GPT-NeoX.

    Raises:
        RefusedError: config and yml contradict each other.
    """
    decided = {*settings.values, "max_positions", "vocab"}
    if spec.sliding_window is not None and base.sliding_window == spec.sliding_window - 1:
        decided.add("sliding_window")
    require_same_settings(spec, base, f"{where} and its config.json", "yml | config", decided)


def require_same_yml(
    spec: ModelSpec, described: Callable[[Mapping[str, Any], str], ModelSpec], tag: Path, settings: Settings, where: str
) -> tuple[list[str], Collection[str]]:
    """Refuse a yml of the user that describes another model than the yml saved with the weights, if there is one.

    Args:
        spec: the model of the user's yml.
        described: makes the model of a yml, and of what to call the yml in an error.
        tag: the folder of the weights.
        settings: the user's settings, which hold of both.
        where: what to call the user's yml in an error.

    Returns:
        Notes for the user, on keys of the saved yml that were accepted, or why it describes no model; and its keys.

    Raises:
        UnsupportedError: the saved yml describes a model that is not supported.
        RefusedError: the two contradict each other.
    """
    try:
        config, name = config_of(tag, None)
    except OptionNeededError:  # there is none
        return [], ()
    except SourceError as error:
        return [f"{where} was not compared with the yml saved with the weights: {error}"], ()
    name += " (saved with the weights)"
    notes = require_known(config, name, settings.accept)
    try:
        saved = described(config, name)
    except SourceError as error:
        return [*notes, f"{where} was not compared with the yml saved with the weights: {error}"], config.keys()
    both = f"{where} and the yml saved with the weights"
    require_same_settings(spec, saved, both, "--config | saved", {*settings.values})
    return notes, config.keys()
