"""Judge: is the layer of a Megatron checkpoint that predicts a second token the one of a Hugging Face folder?

The real megatron-core (0.16.1) is built with it from the Hugging Face config, loads the checkpoint with strict=True,
and its layer must give the hidden states of transformers' own `MtpModel`, which reads the Hub's names of the folder.

    python mtp_judge.py MEGATRON HF [NORM]      on as many ranks as the checkpoint has; megatron_judge.py says the rest

A torch_dist checkpoint is judged by megatron_dist_judge.py, with what is here.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron_judge as judge
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec_for_backend
from te_layers import Layers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

ANY = argparse.Namespace(tp=None, pp=None, vpp=None, first=None, last=None)


def theirs(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """What transformers computes: of the hidden states behind the last norm, and of the next tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types, model.config.mtp_mlp_layer_types = ["full_attention"], ["sparse"]
    behind = rf"model\.layers\.{model.config.num_hidden_layers}\."  # as the class has it of its released models
    model._keys_to_ignore_on_load_unexpected = [behind, "^mtp"]
    second = MtpModel.from_pretrained(model).eval()
    places = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = model.model(ids).last_hidden_state[:, :-1]
    return second.forward_layer(0, hidden, places[:, :-1], None, input_ids=ids[:, 1:])


def build(c: Any, config: Any, padded: int) -> list[GPTModel]:
    """This stage's model, with the layer behind the decoder on the last one (models/gpt/gpt_model.py:135)."""
    config.mtp_num_layers = 1
    layers, last = judge.layer_spec(config, None), ps.is_pipeline_last_stage()
    backend = Layers() if config.experimental_attention_variant else LocalSpecProvider()
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=get_gpt_mtp_block_spec_for_backend(config, layers, backend) if last else None,
        vocab_size=padded,
        max_sequence_length=c.max_position_embeddings,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=last,
        parallel_output=False,
        share_embeddings_and_output_weights=c.tie_word_embeddings,
        **judge.position_arguments(c),
    )
    return [model.to(config.params_dtype)]


class Seen(Exception):
    """The layer has given its states; what is done with them is not asked."""


def ours(model: GPTModel, ids: torch.Tensor) -> torch.Tensor | None:
    """The states of the layer on the last stage; None elsewhere."""
    places = torch.arange(ids.shape[1])[None].expand_as(ids)
    if not model.pre_process:
        x = torch.empty(ids.shape[1], ids.shape[0], model.config.hidden_size)
        dist.recv(x, src=ps.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(x)
    states: list[torch.Tensor] = []
    if model.post_process:

        def see(*args: Any) -> None:
            states.append(args[-1][0])
            raise Seen

        model.mtp.layers[0].register_forward_hook(see)
    try:
        with judge.CpuForCuda():
            y = model(ids, places, None, labels=ids, loss_mask=torch.ones_like(ids, dtype=torch.float32))
    except Seen:
        return states[0].transpose(0, 1)[:, :-1]
    dist.send(y.contiguous(), dst=ps.get_pipeline_model_parallel_next_rank())
    return None


@torch.no_grad()
def main() -> int:
    """Exit status 0 when both agree."""
    faulthandler.dump_traceback_later(240.0, exit=True)
    torch.set_num_threads(1)
    judge.logging.set_verbosity_error()
    judge.logging.disable_progress_bar()
    judge.patch_for_cpu()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    folder, hf = judge.iteration_folder(Path(sys.argv[1])), Path(sys.argv[2])
    first = judge.load_file(next(folder.glob("mp_rank_*")))
    topology, c = judge.Topology.read(first["args"], ANY), AutoConfig.from_pretrained(hf)
    judge.start_groups(topology)
    stored = judge.load_file(folder / topology.folder(*judge.my_ranks()))
    failures = [] if stored["args"].mtp_num_layers == 1 else ["args do not say mtp_num_layers = 1"]
    padded = judge.padded_vocabulary(c, topology, stored["args"])
    (model,) = build(c, judge.transformer_config(c, topology, torch.float32), padded)
    judge.agree(failures + judge.load_chunks([model], stored, ["model"], sys.argv[3]))
    ids = judge.token_ids(c)
    states, failures = ours(model.float().eval(), ids), []
    if states is not None and ps.get_tensor_model_parallel_rank() == ps.get_data_parallel_rank() == 0:
        failures = judge.compare_logits(states, theirs(hf, ids), 1e-4)
    judge.agree(failures)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
