"""The step for oellm-autoexp is built from its configuration as there, and its command converts a run.

The interface is a stand-in with the names of OpenEuroLLM/oellm-autoexp at c6d0cc0, which is on no package index;
compoconf, which makes steps of configurations, is the real one. With that repository the step was built by hand.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from abc import abstractmethod
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import vitruvian

FOLDER = Path(__file__).parents[2] / "examples/oellm_autoexp"


@pytest.fixture
def interface(monkeypatch):
    from compoconf import RegistrableConfigInterface, register_interface

    @register_interface
    class PostProcessStepInterface(RegistrableConfigInterface):
        def __init__(self, config):
            self.config = config

        @abstractmethod
        def build_command(self): ...

        @abstractmethod
        def get_run_mode(self): ...

    names = ("oellm_autoexp", "oellm_autoexp.postprocess", "oellm_autoexp.postprocess.base")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].PostProcessStepInterface = PostProcessStepInterface
    spec = importlib.util.spec_from_file_location("vitruvian_step", FOLDER / "vitruvian_step.py")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "vitruvian_step", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(sys.modules["vitruvian_step"])
    return PostProcessStepInterface


def test_the_step_of_a_configuration_converts_a_run(model, interface, tmp_path):
    from compoconf import parse_config

    source, run, out = model("qwen3", "bfloat16"), tmp_path / "a run", tmp_path / "hf"
    vitruvian.convert(source, run, to="megatron", format="torch_dist", tp=2)
    fields = yaml.safe_load((FOLDER / "vitruvian.yaml").read_text())["postprocess"]["convert_hf"]
    assert fields.keys() >= {"class_name", "run", "iteration", "out", "config"}
    fields |= {"run": str(run), "out": str(out), "config": str(source), "iteration": 0, "run_mode": "new_job"}
    fields |= {"program": f"{sys.executable} -m vitruvian"}
    step = parse_config(interface.cfgtype, fields).instantiate(interface)
    assert step.get_run_mode() == "new_job"
    env = os.environ | {"PYTHONPATH": str(FOLDER.parents[1])}
    subprocess.run(["bash", "-c", step.build_command()], check=True, timeout=200, env=env, capture_output=True)
    assert vitruvian.digest(out).digest == vitruvian.digest(source).digest
