"""One flipped bit in one file of a source, anywhere: the output has the tensors of the sound source, or there is none.

The sources are tiny, of torch's own writers where it has one, of real GPT-NeoX and DeepSpeed, and of our own writer for
Megatron. They are made once a process.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from converters.prove.digest import MANIFEST
from tests.in_process import convert

GOLDEN = Path(__file__).parents[1] / "golden" / "neox"
BINARY = (".distcp", ".metadata", ".pt", ".bin")
"""What is flipped: a text has no checksum, and says what it says."""
CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 61, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "dtype": "bfloat16",
}  # fmt: skip


def attack(seed: int, folder: Path) -> str:
    """Flip one bit of a source, and convert it.

    Returns:
        What came of it: `refused`, or `right` where the bit was in nothing that matters.

    Raises:
        AssertionError: the output has other tensors; or a bug.
    """
    draw = random.Random(seed)
    kind = draw.choice(sorted(KINDS))
    sound, command, expected = _source(kind)
    src, out = folder / "src", folder / "out"
    shutil.copytree(sound, src)
    path = draw.choice(sorted(file for file in src.rglob("*") if file.name.endswith(BINARY)))
    raw = bytearray(path.read_bytes())
    at, bit = _place(draw, raw), draw.randrange(8)
    raw[at] ^= 1 << bit
    path.write_bytes(raw)
    code, output = convert(command[0], src, out, *command[1:], "-q")
    case = (
        f"seed {seed}: bit {bit} of byte {at} of {len(raw)} in {path.relative_to(src)} of {kind}: exit {code}\n{output}"
    )
    assert code not in (1, None), case
    assert "Traceback" not in output, case
    assert (code == 0) == out.exists(), case
    if code:
        assert "error: " in output, case
        return "refused"
    converted = _tensors(out)
    wrong = sorted(name for name in {*converted, *expected} if converted.get(name) != expected.get(name))
    assert not wrong, f"{case}\n{len(wrong)} tensors are not those of the sound source: {wrong[:4]}"
    return "right"


def _place(draw: random.Random, raw: bytes) -> int:
    """A byte of a file: any one; or, for they are few, one of a zip's headers, or of the file's beginning or end."""
    marks = (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06")
    near = [at for mark in marks for at in _all(raw, mark)]
    ends = [0, max(0, len(raw) - 200)]
    first = draw.choice([draw.randrange(len(raw)), draw.choice(near or ends), draw.choice(ends)])
    return min(len(raw) - 1, first + draw.choice([0, draw.randrange(200)]))


def _all(raw: bytes, mark: bytes) -> list[int]:
    places, at = [], raw.find(mark)
    while at >= 0:
        places.append(at)
        at = raw.find(mark, at + 1)
    return places


def _tensors(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every tensor of a Hugging Face folder: element type, shape and bytes."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        for name, about in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                low, high = about["data_offsets"]
                tensors[name] = (about["dtype"], about["shape"], raw[8 + length + low : 8 + length + high])
    return tensors


# --- sources ---------------------------------------------------------------------------------------------------------


@cache
def _scratch() -> Path:
    return Path(mkdtemp(prefix="flips-"))


@cache
def _source(kind: str) -> tuple[Path, list[object], dict[str, tuple[str, list[int], bytes]]]:
    """A sound source, the command with its options, and the tensors that it gives."""
    make, command = KINDS[kind]
    folder, out = _scratch() / kind, _scratch() / f"{kind}-out"
    make(folder)
    for path in folder.rglob(MANIFEST):  # as another program leaves it
        path.unlink()
    config = ["--config", _hf()] if command[0] == "fsdp2hf" else []
    code, output = convert(command[0], folder, out, *command[1:], *config)
    assert code == 0, output
    return folder, [*command, *config], _tensors(out)


@cache
def _hf() -> Path:
    """A Hugging Face folder with random weights."""
    from safetensors.torch import save_file

    folder = _scratch() / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(CONFIG)))
    save_file(_weights(), folder / "model.safetensors", {"format": "pt"})
    return folder


def _weights() -> dict[str, Any]:
    import torch

    hidden, wide, kv, rows = 32, 48, 16, 61
    shapes = {
        "model.embed_tokens.weight": [rows, hidden],
        "model.norm.weight": [hidden],
        "lm_head.weight": [rows, hidden],
    }
    for layer in range(2):
        parts = {
            "self_attn.q_proj": [hidden, hidden], "self_attn.k_proj": [kv, hidden], "self_attn.v_proj": [kv, hidden],
            "self_attn.o_proj": [hidden, hidden], "mlp.gate_proj": [wide, hidden], "mlp.up_proj": [wide, hidden],
            "mlp.down_proj": [hidden, wide], "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def _dcp(folder: Path) -> None:
    from tests.faults.dcp_tools import save

    save(folder, _weights())


def _full(folder: Path) -> None:
    import torch

    folder.mkdir()
    torch.save(_weights(), folder / "pytorch_model_fsdp.bin")


def _pickled(folder: Path) -> None:
    import torch

    folder.mkdir()
    shutil.copy(_hf() / "config.json", folder)
    torch.save(_weights(), folder / "pytorch_model.bin")


def _made(*argv: object) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        code, output = convert(argv[0], _hf(), folder, *argv[1:])
        assert code == 0, output

    return make


def _golden(name: str) -> Callable[[Path], None]:
    return lambda folder: shutil.copytree(GOLDEN / name, folder) and None


NEOX: list[object] = ["neox2hf", "--vocab-size", 101, "--gqa-layout", "blocked"]
KINDS: Mapping[str, tuple[Callable[[Path], None], list[object]]] = {
    "FSDP DCP": (_dcp, ["fsdp2hf"]),
    "full state dict": (_full, ["fsdp2hf"]),
    "pickled Hugging Face": (_pickled, ["hf2hf"]),
    "Megatron": (_made("hf2megatron", "--tp", 2, "--pp", 2), ["megatron2hf"]),
    "Megatron torch_dist": (_made("hf2megatron", "--format", "torch_dist"), ["megatron2hf"]),
    "Megatron-LLM": (_made("hf2megatron", "--format", "megatron-llm", "--tp", 2), ["megatron2hf"]),
    "GPT-NeoX": (_golden("llama-gqa-pp2-tp2"), NEOX),
    "ZeRO": (_golden("llama-bf16-optimizer-tp2"), [*NEOX, "--weights", "fp32-master"]),
}
"""How each source is made, and the command that reads it."""
