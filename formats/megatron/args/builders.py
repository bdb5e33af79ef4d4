"""The functions that build the layers of Megatron-Bridge's and NeMo 2's classes, and the code that computes them.

Both go by the function in `transformer_layer_spec` alone, whatever the field `transformer_impl` says. Their own
functions take the layers of Transformer Engine but for `local_layer_spec`, and do not pass `use_te_activation_func` on.
With `attention_backend` local both put megatron-core's own attention into a layer, whichever the function has chosen.

Facts: Megatron-Bridge 0.2 to 0.6 models/gpt_provider.py (`transformer_engine_layer_spec`, `GPTModelProvider.provide`);
NeMo 2.5 collections/llm/gpt/model/base.py (`GPTConfig.configure_model`); megatron-core 0.16 to 0.19
models/gpt/gpt_layer_specs.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from formats.megatron.args.fields import LAYERS
from formats.megatron.args.layers import is_local
from formats.megatron.args.provider import TARGET

VARIANTS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
ENGINE = "use_transformer_engine"
"""The argument that takes the layers of Transformer Engine."""
OWN: Mapping[str, Collection[str]] = {
    f"{module}.{kind}_layer_spec": ()
    for module in ("megatron.bridge.models.gpt_provider", "nemo.collections.llm.gpt.model.base")
    for kind in ("default", "local", "transformer_engine", "transformer_engine_full")
}
"""The functions of Bridge and NeMo, which are given no arguments."""
BUILDERS: Mapping[str, Collection[str]] = {
    **OWN,
    "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec": (ENGINE,),
    f"{VARIANTS}.get_transformer_block_with_experimental_attention_variant_spec": (),
}
"""Functions that build layers of what the other fields say: the arguments they may be given, which choose kernels.

The last one is that of a model with latents, or with linear attention.
"""


def called(function: Any) -> tuple[str, list[str]]:
    """The import path of a function, and the names of the arguments that it is given.

    Args:
        function: a function, or one with arguments (`functools.partial`), as utils/yaml_utils.py of Megatron-Bridge
            writes both.
    """
    fields = function if isinstance(function, dict) else {TARGET: function}
    given = [key for key, value in fields.items() if key not in (TARGET, "_call_", "_partial_") and value != []]
    return str(fields.get(TARGET)), given


def computed_by(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The args of Megatron-LM for the code that computes the layers of a class.

    The field of a function that is none of `BUILDERS` is among them: no argument, so that it is refused.
    """
    builder = fields.get(LAYERS)
    name, given = called(builder)
    odd = [key for key in given if key not in BUILDERS.get(name, given)]
    local = name.endswith(".local_layer_spec") or (isinstance(builder, dict) and builder.get(ENGINE) is False)
    args = {"transformer_impl": "local" if local else "transformer_engine"}
    if is_local(fields.get("attention_backend")):
        args["attention_backend"] = "local"
    if builder is not None and (name not in BUILDERS or odd):
        args[LAYERS] = f"{name}({', '.join(odd)})" if odd else name
    unheeded = (builder is None or name in OWN) and fields.get("use_te_activation_func")
    return {**args, **({"use_te_activation_func": False} if unheeded else {})}
