"""A step of oellm-autoexp that makes a Hugging Face model of a Megatron run, torch_dist or torch, without a GPU.

Copy this file to `oellm_autoexp/postprocess/vitruvian_step.py` and import it in `oellm_autoexp/orchestrator.py` beside
the other steps. It replaces MegatronDistToTorchStep and MegatronToHFStep; vitruvian.yaml is its configuration.

Interface: oellm_autoexp/postprocess/base.py of OpenEuroLLM/oellm-autoexp at c6d0cc0 (2026-08-13).
"""

import shlex
from dataclasses import dataclass
from typing import Literal

from compoconf import ConfigInterface, register
from oellm_autoexp.postprocess.base import PostProcessStepInterface


@dataclass(kw_only=True)
class VitruvianStepConfig(ConfigInterface):
    """What is converted.

    Attributes:
        run: the folder that Megatron-LM saves to, in any format and topology.
        iteration: the checkpoint; 0 for the newest.
        out: the folder of the model; it is complete or absent.
        config: a Hugging Face folder with config.json and tokenizer.
        options: further options of `convert megatron2hf`, such as `--dtype bf16`.
        program: how vitruvian is called; the step runs in the container of the training.
        run_mode: `same_job`, or `new_job` for where no GPU waits meanwhile.
    """

    class_name: str = "VitruvianStep"
    run: str = ""
    iteration: int = 0
    out: str = ""
    config: str = ""
    options: str = ""
    program: str = "vitruvian"
    run_mode: str = "same_job"


@register
class VitruvianStep(PostProcessStepInterface):
    """Writes the command; what is refused there ends the job with its exit code."""

    config: VitruvianStepConfig

    def get_run_mode(self) -> Literal["same_job", "new_job"]:
        """Where the step runs."""
        return "new_job" if self.config.run_mode == "new_job" else "same_job"

    def build_command(self) -> str:
        """The command; after a kill the same one resumes."""
        words = ["convert", "megatron2hf", self.config.run, self.config.out, "--config", self.config.config]
        words += ["--iteration", str(self.config.iteration)] if self.config.iteration else []
        return f"{self.config.program} {shlex.join(words)} {self.config.options}".rstrip()
