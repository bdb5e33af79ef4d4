"""Tiny models of a transformers class in which each axis has a different size, so that a size tells its axis.

Facts: transformers 5.23.0, configuration_utils.py: the config of a model type is a dataclass, whose `attribute_map`
maps the usual name of a key to the name that the class has for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any

from converters.draft.roles import roles_of
from formats.errors import UnsupportedError, UsageError, short
from formats.families import FAMILIES
from formats.huggingface.settings_table import USUAL
from formats.model.spec import ModelSpec

SIZES: Mapping[str, tuple[int, int]] = {
    "layers": (4, 4), "heads": (15, 14), "kv_heads": (3, 2), "head_dim": (16, 24), "ffn": (219, 211),
    "vocab": (509, 521), "max_positions": (131, 137), "experts": (16, 24), "expert_ffn": (93, 89),
    "query_rank": (29, 31), "latent_rank": (37, 41), "nope_dim": (20, 26), "rope_dim": (4, 6),
}  # fmt: skip
"""Setting: its size in the two tiny models."""
WIDTH = (330, 364)
"""The hidden size in the two tiny models, unless it has to be heads times head size."""
COUNTED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
"""Config keys that count shared experts, whose MLPs are stored as one."""
SHARED, COUNT = (111, 103), 2
IN_FRONT = ("dense_layers", 1)
"""The setting and value for the number of layers without experts, which leaves layers with experts."""
LAYER_KEYS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "per_layer_config")
"""Config keys with an entry for each layer, which a class makes itself from the number of layers."""
SETTINGS = (*SIZES, "hidden", "shared_ffn", "dense_layers")
"""The settings that tiny models have values for."""
NEEDED = ("layers", "hidden", "heads", "vocab")
"""The settings without a config key for which there is no tiny model whose axes are told by their sizes."""
BY_HAND = "its table is written by hand: CONTRIBUTING.md, Add a family"
"""The hint for a model that cannot be drafted."""
MOST_WORDS = 300
"""Most characters of an error of transformers in an error here."""


@contextmanager
def by_transformers(architecture: str) -> Iterator[None]:
    """A context in which nothing but classes of transformers run, to build the tiny model of an architecture.

    Raises:
        UnsupportedError: they raised whatever they raise for a config or sizes that they do not support.
    """
    try:
        yield
    except Exception as error:  # that of a class of transformers: nothing of this project runs inside
        words = shorten(f"{type(error).__name__}: {error}", MOST_WORDS, placeholder=" …")
        raise UnsupportedError(
            f"transformers builds no tiny {architecture}, in which every size is another number: {words}", BY_HAND
        ) from error


def spellings() -> dict[str, list[str]]:
    """Setting: every config key that a family has for it, the usual one first."""
    keys_of = {name: [key] for name, key in USUAL.items()}
    for family in FAMILIES.values():
        for name, keys in family.keys.items():
            keys_of.setdefault(name, []).extend(key for key in keys.split() if key not in keys_of.get(name, ()))
    return keys_of


@dataclass(frozen=True)
class Probe:
    """A tiny model on the meta device.

    Attributes:
        config: the config of transformers.
        sizes: the size of each axis.
        memory: shapes of the tensors in memory, in the order of the parameters.
        hub: name, shape and pieces of each tensor that the model is saved as (`plan/tensor_origins.py`).
        input_major: whether matrices are input-major (transformers' `Conv1D`).
    """

    config: Any
    sizes: Mapping[str, int]
    memory: Mapping[str, tuple[int, ...]]
    hub: Mapping[str, Mapping[str, Any]]
    input_major: bool


@dataclass(frozen=True)
class Model:
    """A model type of transformers, with the keys of a config.

    Attributes:
        kind: the model type.
        said: the keys of a config.json; empty for the defaults of the class.
    """

    kind: str
    said: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def config_class(self) -> Any:
        """The config class of the model type."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[self.kind]

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The config keys that only this class has, and their default values.

        Raises:
            UnsupportedError: the class refuses its own defaults, or has a value for each layer in the place of one.
        """
        from transformers import PreTrainedConfig

        shared = {field_of_class.name for field_of_class in fields(PreTrainedConfig)}
        names = [
            field_of_class.name for field_of_class in fields(self.config_class) if field_of_class.name not in shared
        ]
        with by_transformers(self.architecture):
            config = self.config_class()
            return {name: getattr(config, name, None) for name in names}

    @cached_property
    def keys(self) -> dict[str, str]:
        """Setting: the config key of this class for it."""
        renamed, keys_of = self.config_class.attribute_map, dict[str, str]()
        for name, keys in spellings().items():  # a key of several settings is taken for the first of them
            own = [renamed.get(key, key) for key in keys]
            free = [key for key in own if key in self.defaults and key not in keys_of.values()]
            keys_of |= {name: free[0]} if free else {}
        return keys_of

    @property
    def untied(self) -> dict[str, Any]:
        """The config keys with which the output head is a matrix of its own."""
        return {"tie_word_embeddings": False} if "tie_word_embeddings" in self.defaults else {}

    @cached_property
    def architecture(self) -> str:
        """The name of the model class: that in the config, or the one that generates text.

        Raises:
            UnsupportedError: transformers has no class of the model type that generates text.
        """
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        named = self.said.get("architectures") or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(self.kind)]
        if not isinstance(named, list) or not isinstance(named[0], str):
            raise UnsupportedError(f"transformers has no class of {self.kind} that generates text of text alone")
        return named[0]

    @cached_property
    def square(self) -> bool:
        """Whether an output projection of the model class is `hidden` by `hidden`, whatever the size of a head is."""
        if "head_dim" not in self.keys:
            return False
        config, sizes = self._sized(0, WIDTH[0], {})
        shapes = {
            re.sub(r"\.\d+\.", ".{layer}.", name): tuple(parameter.shape)
            for name, parameter in self.built(config, "meta").named_parameters()
        }
        return any(shape == (sizes["hidden"],) * 2 and ("output",) in roles_of(name) for name, shape in shapes.items())

    @cached_property
    def linear(self) -> str:
        """The class of linear layers in the model class where it is not torch's `nn.Linear`; empty where it is."""
        import torch
        from transformers.pytorch_utils import Conv1D

        config, _ = self.tiny()
        modules = self.built(config, "meta").modules()
        kinds = {type(module) for module in modules if isinstance(module, torch.nn.Linear | Conv1D)}
        return " and ".join(sorted(kind.__name__ for kind in kinds - {torch.nn.Linear}))

    def built(self, config: Any, device: str) -> Any:
        """The model of a config, on a device.

        Raises:
            UnsupportedError: its class builds no model of these sizes.
        """
        import torch
        import transformers

        with by_transformers(self.architecture), torch.device(device):
            return getattr(transformers, self.architecture)(config)

    def tiny(self, number: int = 0, **changes: Any) -> tuple[Any, dict[str, int]]:
        """A config in which each axis has a different size, and these sizes; the hidden size may be that of all heads.

        Args:
            number: which of the two tiny models, 0 or 1.
            changes: further config keys.

        Raises:
            UnsupportedError: the config class lacks a key that a draft needs, or refuses these sizes.
        """
        return self._sized(number, 0 if self.square else WIDTH[number], changes)

    def _sized(self, number: int, width: int, changes: Mapping[str, Any]) -> tuple[Any, dict[str, int]]:
        """As `tiny`, with a given hidden size; 0 for heads times head size."""
        keys = self.keys
        if missing := [name for name in NEEDED if name not in keys]:
            raise UnsupportedError(
                f"{self.config_class.__name__} has no known config key for {', '.join(missing)}, which a draft needs",
                BY_HAND,
            )
        keywords = {key: value for key, value in self.said.items() if key not in LAYER_KEYS}
        keywords |= {key: 1 for key in self.defaults if key.endswith("_token_id")}
        values: dict[str, Any] = {name: sizes[number] for name, sizes in SIZES.items() if name in keys}
        heads, head = values["heads"], values.get("head_dim", SIZES["head_dim"][number])
        values["hidden"] = width if width and "head_dim" in keys else heads * head
        if "latent_rank" in keys:
            values["kv_heads"] = heads
        shared = keys.get("shared_ffn", "")
        values["shared_ffn"] = COUNT if shared in COUNTED else SHARED[number]
        if type(self.defaults.get(keys.get(IN_FRONT[0], ""))) is int:
            values[IN_FRONT[0]] = IN_FRONT[1]
        keywords |= {keys[name]: value for name, value in values.items() if name in keys}
        with by_transformers(self.architecture):
            config = self.config_class(**{**keywords, **changes})
        config.architectures = [self.architecture]
        values |= {name: SIZES[name][number] for name in SIZES if name not in values}
        ffn = values["expert_ffn"] if "expert_ffn" in keys else values["ffn"]
        values |= {"kv_heads": values["kv_heads"] if "kv_heads" in keys else heads, "head_dim": head}
        values |= {"expert_ffn": ffn, "shared_ffn": COUNT * ffn if shared in COUNTED else SHARED[number]}
        values.pop("dense_layers", None)
        return config, ModelSpec(family="llama", norm_epsilon=1.0, tied=False, **values).sizes()

    def probe(self, number: int = 0, **changes: Any) -> Probe:
        """A tiny model on the meta device. Arguments are as in `tiny`."""
        from converters.plan import tensor_origins

        config, sizes = self.tiny(number, **changes)
        model = self.built(config, "meta")
        model._weight_conversions = None  # noqa: SLF001  # no file was loaded: the conversions are those of the class
        answer = tensor_origins.trace_model(model, {})
        order = [*dict.fromkeys([*dict(model.named_parameters()), *answer["memory"]])]
        memory = {name: tuple(answer["memory"][name]) for name in order if name in answer["memory"]}
        turned = any(type(module).__name__ == "Conv1D" for module in model.modules())
        return Probe(config, sizes, memory, answer["hub"], turned)


def model_of(name: str) -> Model:
    """The model of a model type, or of a folder with a config.json.

    Raises:
        UsageError: the name is neither, or transformers is not installed.
        UnsupportedError: transformers does not know the model type.
    """
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        raise UsageError("a family is drafted from transformers", "pip install 'vitruvian[transformers]'") from None
    path, config = Path(name) / "config.json", dict[str, Any]()
    if path.is_file():
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise UsageError(f"{path} is no JSON: {error}") from None
    kind = config.get("model_type", name)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        known = bool(config) or re.fullmatch(r"[\w.-]+", name)
        reason = f"transformers {transformers.__version__} does not know {short(kind)}"
        if not known:
            raise UsageError(f"{name} is neither a model type nor a folder with a config.json")
        raise UnsupportedError(reason, "a newer version may; a table of another class is written by hand")
    return Model(kind, config)
