"""Plug-ins of trainers. With axolotl 0.19.0 itself, on a CPU, a training of two steps exported both of its checkpoints.

Where it is not installed, its class for plug-ins is stood for by the two methods that ours overrides, as of
integrations/base.py.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest

import vitruvian


class BasePlugin:
    """That of axolotl."""

    def get_input_args(self):
        return None

    def add_callbacks_post_trainer(self, cfg, trainer):
        return []


@pytest.fixture
def plugin(monkeypatch):
    """What axolotl makes of `plugins: [vitruvian.axolotl.ExportPlugin]`, and its model of what the config may say."""
    ours = ("vitruvian.axolotl", "converters.library.frameworks.axolotl_plugin")
    try:
        base = import_module("axolotl.integrations.base")
    except ModuleNotFoundError:
        base = ModuleType("axolotl.integrations.base")
        base.BasePlugin = BasePlugin
        for name in ("axolotl", "axolotl.integrations"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, base.__name__, base)
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    instance = import_module(ours[0]).ExportPlugin()
    assert isinstance(instance, base.BasePlugin)
    module, _, name = instance.get_input_args().rpartition(".")
    yield instance, getattr(import_module(module), name)
    for name in ours:
        sys.modules.pop(name, None)


def test_axolotl_exports_what_its_config_says(plugin, model, tmp_path):
    instance, args = plugin
    parsed = args(vitruvian_export={"out": str(tmp_path / "hub"), "dtype": "fp16", "strict": True})
    cfg = SimpleNamespace(base_model=str(model("llama", "float32")), vitruvian_export=parsed.vitruvian_export)
    (callback,) = instance.add_callbacks_post_trainer(cfg, None)
    run = tmp_path / "run"
    vitruvian.convert(model("llama", "float32"), run / "checkpoint-3", to="fsdp", ranks=2)
    (run / "checkpoint-3" / "config.json").unlink()  # axolotl's base model has it
    state = SimpleNamespace(is_world_process_zero=True, global_step=3)
    callback.on_save(SimpleNamespace(output_dir=str(run)), state, None)
    callback.on_train_end(None, None, None)
    assert vitruvian.open(tmp_path / "hub" / "checkpoint-3").record["dtypes"] == {"F16": 39}


def test_what_axolotl_is_told_is_checked_before_it_trains(plugin, tmp_path):
    instance, args = plugin
    for settings, message in (
        (None, "vitruvian_export has no out"),
        ({"push": "acme/tiny"}, "vitruvian_export has no out"),
        ({"out": "hub", "colour": 1}, "there is no option colour"),
        ({"out": "hub", "push": "bad name!"}, "is not a valid name on the Hub"),
    ):
        cfg = SimpleNamespace(base_model="base", vitruvian_export=args(vitruvian_export=settings).vitruvian_export)
        with pytest.raises(vitruvian.UsageError, match=message):
            instance.add_callbacks_post_trainer(cfg, None)
