"""One model through every format that can hold it, in one chain; what cannot, says why. And `convert formats`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

import vitruvian
from converters.commands.explain import held_by
from converters.common.manifest import total
from converters.convert import run
from converters.plan.request import Request
from converters.plan.targets import (
    plan_fsdp,
    plan_huggingface,
    plan_mds,
    plan_megatron,
    plan_nanotron,
    plan_neox,
)
from formats.deepspeed.mds import tables as mds_tables
from formats.deepspeed.mds import writer as mds_writer
from formats.deepspeed.neox import writer as neox_writer
from formats.errors import VitruvianError
from formats.families import family_of, find_family
from formats.huggingface.nanotron import model_config
from formats.megatron import megatron_llm
from formats.megatron.args.options import CORE, DIST, FSDP_DTENSOR, Options
from formats.registry import open_checkpoint
from tests.golden import test_maxtext as maxtext
from tests.models import MODELS, RENAMED, files, settings_of, variants_slow

LLM = megatron_llm.NAME


def to_megatron(source, request, tp: int, **options: Any):
    """A plan of megatron-core's formats, in which experts with biases are whole, and so are the ways to latents.

    Linear attention is Transformer Engine's.
    """
    family = source.spec.family
    options |= {"ep": tp, "etp": 1} if family == "gpt_oss" else {}
    options |= {"norm": "te"} if source.spec.latent_rank or source.spec.mixed else {}
    return plan_megatron(source, request, Options(tp, **options), None)


def order_of(source):
    """An order of query, key and value in Megatron-DeepSpeed, where trees differ in it."""
    return None if mds_tables.FAMILIES.get(source.spec.family) == mds_tables.OF_BIGSCIENCE else "blocked"


CHAIN = {
    "megatron_fsdp": lambda source, request: to_megatron(source, request, 1, dialect=FSDP_DTENSOR),
    "megatron_dist": lambda source, request: to_megatron(source, request, 2, pp=2, dialect=DIST),
    "neox": lambda source, request: plan_neox(source, request, neox_writer.Options(1, 2)),
    "megatron_deepspeed": lambda source, request: plan_mds(source, request, mds_writer.Options(1, 2, order_of(source))),
    "fsdp": lambda source, request: plan_fsdp(source, request, ranks=3),
    "nanotron": lambda source, request: plan_nanotron(source, request, 4),
    "megatron-llm": lambda source, request: plan_megatron(source, request, Options(1, 2, dialect=LLM), None),
    "megatron": lambda source, request: to_megatron(source, request, 4, pp=2, norm="local", dialect=CORE),
    "huggingface": lambda source, request: plan_huggingface(source, request, None),
}
"""Format: how it is planned, each time from what the format before it wrote."""

RESIDUAL = "attention and MLP read the same residual"
NORMS = "megatron-core has no norms after attention and MLP"
REFUSED = {
    "llama-tied": {"megatron-llm": "an output head of their own"},
    "llama3": {
        "megatron-llm": "only knows linear ones",
        "neox": "no rotary embedding of the kind llama3",
        "nanotron": "plain or linearly scaled, these are llama3",
        "megatron_deepspeed": "has no use_rope_scaling = True",
    },
    "mistral": {
        "megatron-llm": "a head of this model has 16",
        "neox": "heads of hidden / heads = 8",
        "nanotron": "hidden / heads = 8 elements",
    },
    "mistral-tied": {"megatron-llm": "an output head of their own"},
    "phi3": {"megatron-llm": "has no rotary_fraction", "neox": "has no phi3"},
    "phi3-whole": {"neox": "has no phi3"},
    "phi3-tied": {"megatron-llm": "an output head of their own", "neox": "has no phi3"},
    "qwen2": {"megatron-llm": "biases everywhere or nowhere", "neox": "has no qwen2"},
    "qwen2-tied": {"megatron-llm": "biases everywhere or nowhere", "neox": "has no qwen2"},
    "qwen3": {"megatron-llm": "no norms on query and key", "neox": "heads of hidden / heads = 8"},
    "qwen3-tied": {"megatron-llm": "no norms on query and key", "neox": "heads of hidden / heads = 8"},
    "starcoder2": {"megatron-llm": "RMSNorm and its MLP has a gate", "neox": "has no starcoder2"},
    "starcoder2-tied": {"megatron-llm": "RMSNorm and its MLP has a gate", "neox": "has no starcoder2"},
    "gpt2": {"megatron-llm": "RMSNorm and its MLP has a gate"},
    "gpt2-untied": {"megatron-llm": "RMSNorm and its MLP has a gate"},
    "gpt_neox": {"megatron": RESIDUAL, "megatron-llm": "RMSNorm and its MLP has a gate"},
    "gpt_neox-tied": {"megatron-llm": "RMSNorm and its MLP has a gate"},
    "bloom-untied": {"megatron": "no ALiBi", "neox": "has no bloom", "megatron_deepspeed": "no output head of its own"},
    "granite": {"megatron": "multiplies neither", "neox": "has no granite"},
    "granite-tied": {"megatron": "multiplies neither", "neox": "has no granite"},
    "olmo2": {"megatron": NORMS, "neox": "has no olmo2"},
    "olmo2-tied": {"megatron": NORMS, "neox": "has no olmo2"},
    "gemma2": {"megatron": NORMS, "neox": "heads of hidden / heads = 8"},
    "gemma2-untied": {"megatron": NORMS, "neox": "has no gemma2"},
    "gemma3": {"megatron": NORMS, "neox": "heads of hidden / heads = 8"},
    "gemma3-untied": {"megatron": NORMS, "neox": "heads of hidden / heads = 8"},
    **{
        f"{name}{head}": {"megatron-llm": reason, "neox": f"has no {name}"}
        for name, reason in (
            ("mixtral", "no experts"),
            ("qwen2_moe", "biases everywhere or nowhere"),
            ("qwen3_moe", "no norms on query and key"),
            ("dots1", "no norms on query and key"),
        )
        for head in ("", "-tied")
    },
    "qwen2_moe": {
        "megatron-llm": "biases everywhere or nowhere",
        "neox": "has no qwen2_moe",
        "nanotron": "add up to 1, and this model does",
    },
    "qwen3_moe": {"megatron-llm": "no norms on query and key", "neox": "heads of hidden / heads = 8"},
    **{
        f"{name}{head}": {"megatron": RESIDUAL, "neox": f"has no {name.replace('-', '_')}"}
        for name in ("falcon", "falcon-40b", "falcon-11b")
        for head in ("", "-untied")
    },
    "ernie4_5": {"megatron-llm": "a head of this model has 16", "neox": "heads of hidden / heads = 8"},
    "ernie4_5-tied": {"megatron-llm": "an output head of their own", "neox": "rotary embedding of the kind yarn"},
    "ernie4_5-8": {"neox": "has no ernie4_5"},
    "smollm3": {"megatron-llm": "in every layer", "neox": "has no smollm3"},
    "smollm3-tied": {
        "megatron-llm": "have no biases",
        "neox": "has no smollm3",
        "nanotron": "has no mlp_bias, output_bias, qkv_bias",
    },
    "internlm3": {"neox": "has no internlm3"},
    "internlm3-tied": {"megatron-llm": "an output head of their own", "neox": "rotary embedding of the kind llama3"},
    "iquestcoder": {"neox": "has no iquestcoder"},
    "iquestcoder-tied": {"megatron-llm": "no biases", "neox": "has no iquestcoder"},
    "youtu": {"megatron-llm": "no latents of keys and values", "neox": "heads of hidden / heads = 8"},
    "youtu-tied": {"megatron-llm": "no latents of keys and values", "neox": "heads of hidden / heads = 8"},
    "helium": {"neox": "has no helium"},
    "helium-tied": {"megatron-llm": "an output head of their own", "neox": "rotary embedding of the kind yarn"},
    "helium-qkv": {"megatron-llm": "biases everywhere or nowhere", "neox": "has no helium"},
    "helium-biased": {
        "megatron": "mlp_bias and qkv_bias alone",
        "megatron-llm": "have no biases",
        "neox": "has no helium",
    },
    "seed_oss": {"megatron-llm": "biases everywhere or nowhere", "neox": "heads of hidden / heads = 8"},
    "seed_oss-tied": {"megatron-llm": "have no biases", "neox": "has no seed_oss"},
    "seed_oss-plain": {"megatron-llm": "a head of this model has 16", "neox": "heads of hidden / heads = 8"},
    "llama-biased": {
        "megatron-llm": "have no biases",
        "neox": "has no llama with mlp_bias and output_bias and qkv_bias",
        "nanotron": "has no mlp_bias, output_bias, qkv_bias",
    },
    "qwen3-biased": {"megatron": "alone", "megatron-llm": "have no biases", "neox": "heads of hidden / heads = 8"},
    "arcee": {"megatron-llm": "RMSNorm and its MLP has a gate", "neox": "heads of hidden / heads = 8"},
    "arcee-tied": {"megatron-llm": "RMSNorm and its MLP has a gate", "neox": "has no arcee"},
    "ministral": {"megatron-llm": "its window holds for every layer", "neox": "heads of hidden / heads = 8"},
    "ministral-tied": {"megatron-llm": "its window holds for every layer", "neox": "has no ministral"},
    "cwm": {"megatron-llm": "its window holds for every layer", "neox": "heads of hidden / heads = 8"},
    "cwm-tied": {"megatron-llm": "its window holds for every layer", "neox": "rotary embedding of the kind yarn"},
    "jais2": {"megatron-llm": "RMSNorm and its MLP has a gate", "neox": "heads of hidden / heads = 8"},
    "jais2-tied": {"megatron-llm": "RMSNorm and its MLP has a gate", "neox": "has no jais2"},
    "nemotron": {"megatron-llm": "RMSNorm and its MLP has a gate", "neox": "heads of hidden / heads = 8"},
    "nemotron-tied": {"megatron-llm": "RMSNorm and its MLP has a gate", "neox": "has no nemotron"},
    "gpt_oss": {"megatron-llm": "biases everywhere or nowhere", "neox": "heads of hidden / heads = 8"},
    "gpt_oss-tied": {"megatron-llm": "biases everywhere or nowhere", "neox": "heads of hidden / heads = 8"},
    **{
        f"deepseek_{name}{head}": {"megatron-llm": "no experts", "neox": "heads of hidden / heads = 8"}
        for name in ("v2", "v3")
        for head in ("", "-tied")
    },
    "deepseek_v2-grouped": {"megatron-llm": "no experts", "neox": "heads of hidden / heads = 8"},
    "llama4_text": {"megatron": "no attention in chunks", "neox": "heads of hidden / heads = 8"},
    "llama4_text-tied": {"megatron": "no attention in chunks", "neox": "has no llama4_text"},
    "glm4_moe": {"megatron-llm": "biases everywhere or nowhere", "neox": "heads of hidden / heads = 8"},
    "glm4_moe-plain": {"megatron-llm": "no norms on query and key", "neox": "heads of hidden / heads = 8"},
    "glm4_moe_air": {"megatron-llm": "biases everywhere or nowhere", "neox": "heads of hidden / heads = 8"},
    "glm4_moe_lite": {"megatron-llm": "no experts", "neox": "heads of hidden / heads = 8"},
    "glm4_moe_lite-tied": {"megatron-llm": "no experts", "neox": "heads of hidden / heads = 8"},
    "solar_open": {"megatron-llm": "no experts", "neox": "heads of hidden / heads = 8"},
    "hy_v3": {"megatron-llm": "no norms on query and key", "neox": "heads of hidden / heads = 8"},
    "ernie4_5_moe": {"megatron": "after a sigmoid alone", "neox": "has no ernie4_5_moe"},
    "ernie4_5_moe_300b": {"megatron": "after a sigmoid alone", "neox": "has no ernie4_5_moe_300b"},
    "minimax_m2": {"megatron": "no norms over all heads", "neox": "heads of hidden / heads = 8"},
    "olmoe": {"megatron": "no norms over all heads", "neox": "has no olmoe"},
    "granitemoe": {"megatron": "multiplies neither", "neox": "has no granitemoe"},
}
"""Model: the formats that cannot hold it, and a part of the reason. What Megatron lacks, its other formats lack too."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in MODELS},
    "mistral-8": ("mistral", {"head_dim": 8}),
    "ernie4_5-8": ("ernie4_5", {"head_dim": 8}),
    "phi3-whole": ("phi3-tied", {"tie_word_embeddings": False}),
}
"""Name: tiny model, and what is changed of it."""


def reasons(name: str) -> dict[str, str]:
    """The formats that refuse a model, and a part of what they say; of one that is not listed, those that have to."""
    base, changes = CASES[name]
    if name not in REFUSED:
        holders = held_by(find_family(settings_of(base, **changes)))
        return {form: "" for form in CHAIN if form not in holders}
    refusals = REFUSED[name]
    alike = ("megatron_dist", "megatron_fsdp", "megatron-llm")
    lost = dict.fromkeys(alike, refusals["megatron"]) if "megatron" in refusals else {}
    if find_family(settings_of(base, **changes)).name not in mds_tables.FAMILIES:
        lost["megatron_deepspeed"] = "is written of gpt2, llama, bloom"
    if find_family(settings_of(base, **changes)).name not in model_config.MAY_HAVE:
        lost["nanotron"] = "is written of llama, mistral"
    return lost | refusals


def held_by_safetensors(folder: Path) -> dict[str, bytes]:
    """The bits of every tensor of a Hugging Face folder, as the official reader has them."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            tensors |= {name: file.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes() for name in names}
    return tensors


@pytest.mark.parametrize("name", variants_slow(CASES))
def test_through_every_format_and_back(model, tmp_path, name):
    """Each format is read back through the library too, tensor by tensor. The files are cut as transformers cuts."""
    base, changes = CASES[name]
    size = None if base in RENAMED else 20_000
    source = model(base, "bfloat16", shard="20KB" if size else "50GB", **changes)
    wanted_bits = held_by_safetensors(source)
    checkpoint, digests = open_checkpoint(source), set()
    spec, refused = checkpoint.spec, {}
    last = {"huggingface": lambda source, request: plan_huggingface(source, request, size)}
    for form, plan in {**CHAIN, **last}.items():
        request = Request(tmp_path / form, verify=False, quiet=True)
        try:
            digests.add(total(run(plan(checkpoint, request), request)))
        except VitruvianError as error:
            refused[form] = str(error)
            continue
        checkpoint = open_checkpoint(request.out)
        assert checkpoint.spec == spec
        tensors = vitruvian.open(request.out).tensors()
        assert {key: tensor.tobytes() for key, tensor in tensors} == wanted_bits
    expected = reasons(name)
    assert {**refused} == {form: message for form, message in refused.items() if expected.get(form, "\0") in message}
    assert refused.keys() == expected.keys()
    assert len(digests) == 1
    assert files(tmp_path / "huggingface") == files(source)


def test_formats_prints_what_is_proven_here(convert):
    """A family is held by what holds one of its models."""
    holders = json.loads(convert("formats", "--json").out)["held_by"]
    proven: dict[str, set[str]] = {name: {"zero"} for name in holders}  # DeepSpeed's folders: tests/golden/test_zero.py
    for name in ("mistral", "mixtral"):
        proven[name] |= {"mistral"}  # of its own code: tests/golden/test_mistral.py
    for path in maxtext.HERE.glob("*/config.json"):  # read, not written: tests/golden/test_maxtext.py
        proven[json.loads(path.read_text())["model_type"]] |= {"maxtext"}
    for name, (base, changes) in CASES.items():
        config = AutoConfig.for_model(**settings_of(base, **changes)).to_dict()
        proven[family_of(config, name).name] |= CHAIN.keys() - reasons(name).keys()
    assert proven == {name: set(forms) for name, forms in holders.items()}
