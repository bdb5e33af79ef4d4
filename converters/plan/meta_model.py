"""The report of transformers' `from_pretrained` on tensors, made on the meta device: no weight is in memory.

A program of its own, so that no conversion imports torch: a request as JSON on its input, the answer on its output. No
code of a model repository is run, and nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONVERSION = "conversion of the weights"
"""In the error of transformers 5 when tensors that are to be fused do not fit together (utils/loading_report.py)."""


def report(request: dict[str, Any]) -> dict[str, Any]:
    """The tensors that are missing, unexpected or of another shape in the model of a config.

    Args:
        request: `config`, a config.json; and `shapes`, by the names of the tensors. Without these, the config alone is
            read.

    Returns:
        `missing` and `unexpected` names, `mismatched` with the shape that is there and that of the model, `renamed`:
        name and name in the model of each tensor that is loaded as it is, and `errors`, beside what `trace_model`
        returns, or the error in it as `unnamed`; `errors` alone where config and weights make no model; `config` alone,
        as its class reads it, where no shapes were given; or `why` transformers has no answer.
    """
    try:
        import torch
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except Exception as error:  # noqa: BLE001  # a broken installation is as good as none
        return {"why": f"transformers cannot be imported ({_line(error)})"}
    config = request["config"]
    try:
        kind = config["model_type"]
        if kind not in CONFIG_MAPPING:
            return {"why": f"transformers {transformers.__version__} does not know {kind}"}
        with tempfile.TemporaryDirectory() as folder:  # a file can say what a dictionary does not: infinity
            (Path(folder) / "config.json").write_text(json.dumps(config))
            parsed = CONFIG_MAPPING[kind].from_pretrained(folder, local_files_only=True)
        if "shapes" not in request:
            return {"config": json.loads(parsed.to_json_string(use_diff=False))}
        names = config.get("architectures")
        model = getattr(transformers, str(names[0]), None) if names else _usual(type(parsed))
        if model is None:
            name = names[0] if names else f"a class that generates text with {kind}, and architectures names none"
            return {"why": f"transformers {transformers.__version__} does not know {name}"}
        if model.config_class is not type(parsed) and not _is_paired(kind, model.__name__):
            other = model.config_class.model_type
            return {"errors": [f"architectures names {model.__name__}, a class of {other}, and model_type is {kind}"]}
        state = {
            key: torch.empty(tuple(shape), dtype=torch.bfloat16, device="meta")
            for key, shape in request["shapes"].items()
        }
        with _recorded() as renamed:
            made, loading = model.from_pretrained(
                None,
                config=parsed,
                state_dict=state,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # noqa: BLE001  # whatever a model's own code raises: it cannot be asked
        if CONVERSION in str(error):
            return {"errors": [_line(error)]}
        return {"why": f"transformers cannot be asked ({_line(error)})"}
    mismatched = [[key, list(own_shape), list(wanted)] for key, own_shape, wanted in loading["mismatched_keys"]]
    mismatched_keys = {key for key, _, _ in mismatched}
    return {
        "missing": sorted(set(loading["missing_keys"]) - mismatched_keys),
        "unexpected": sorted(set(loading["unexpected_keys"]) - mismatched_keys),
        "mismatched": sorted(mismatched),
        "renamed": renamed,
        "errors": list(map(str, loading["error_msgs"])),
        **_tensor_origins(made, request["shapes"]),
    }


@contextmanager
def _recorded() -> Iterator[list[tuple[str, str]]]:
    """Record the tensors that transformers loads as they are: the name of each, and its name in the model.

    Of transformers 5 (`convert_and_load_state_dict_in_model` in core_model_loading.py, 5.23.0); none of earlier ones.
    """
    renamed: list[tuple[str, str]] = []
    try:
        from transformers.core_model_loading import WeightRenaming
    except ImportError:
        yield renamed
        return
    renaming: Any = WeightRenaming
    add = renaming.add_tensor

    def recorded(self: Any, target_key: str, source_key: str, *args: Any, **kwargs: Any) -> Any:
        renamed.append((source_key, target_key))
        return add(self, target_key, source_key, *args, **kwargs)

    renaming.add_tensor = recorded
    try:
        yield renamed
    finally:
        renaming.add_tensor = add


def _usual(config_class: type) -> Any:
    """The class with which transformers generates text for a config that names no class; None where there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)


def _is_paired(kind: str, name: str) -> bool:
    """Whether an Auto class maps a model type to a class with another config: to the text model of one of images."""
    from transformers.models.auto import modeling_auto

    maps = [mapping for table, mapping in vars(modeling_auto).items() if table.endswith("_MAPPING_NAMES")]
    names = [mapping[kind] for mapping in maps if kind in mapping]
    return any(name == classes if isinstance(classes, str) else name in classes for classes in names)


def _tensor_origins(model: Any, shapes: dict[str, list[int]]) -> dict[str, Any]:
    """The result of `trace_model`; the error as `unnamed` where it cannot follow the version of transformers."""
    path = Path(__file__).with_name("tensor_origins.py")
    spec = importlib.util.spec_from_file_location("tensor_origins", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        tensor_origins: dict[str, Any] = module.trace_model(
            model, {name: tuple(shape) for name, shape in shapes.items()}
        )
    except Exception as error:  # noqa: BLE001  # whatever the version's own code raises
        return {"unnamed": _line(error)}
    return tensor_origins


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are of a package; the current folder is not among the places either
    answer = report(json.load(sys.stdin))
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
