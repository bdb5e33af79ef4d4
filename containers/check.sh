#!/usr/bin/env bash
# The test of an image, run inside it: at the end of its build, and by `apptainer test IMAGE` on the target machine.
set -euo pipefail
export PATH=/opt/vitruvian/venv/bin:$PATH HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
cd "$work"

say() { printf '%s\n' "check: $*"; }

python - <<'PYTHON'
import accelerate, deepspeed, matplotlib, peft, pyarrow, safetensors, tensorboard, torch, transformers, wandb

assert torch.ones(2, 2).sum() == 4
built = open("/opt/vitruvian/torch.txt").read().strip()
assert torch.__version__ == built, f"torch is {torch.__version__}, and was {built} when the image was built"
print(f"check: torch {torch.__version__}, transformers {transformers.__version__}")
PYTHON
python /opt/vitruvian/sbom.py /opt/vitruvian/lock.txt | cmp - /opt/vitruvian/sbom.json
say "what is installed is what the lock and sbom.json say"

convert --help >help.txt
train --help >>help.txt
train doctor
python - <<'PYTHON'
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.for_model(
    "llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)
AutoModelForCausalLM.from_config(config).save_pretrained("model")
PYTHON
convert hf2megatron model megatron --tp 2 --pp 2 >log.txt 2>&1 || { cat log.txt && exit 1; }
convert megatron2hf megatron again >log.txt 2>&1 || { cat log.txt && exit 1; }
convert diff model again
cmp model/model.safetensors again/model.safetensors
say "to Megatron and back: the same bytes"
