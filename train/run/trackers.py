"""Trackers (TensorBoard, Weights & Biases, MLflow, …), which get the curves of a run beside its logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from converters.common.atomic import write_file
from formats.errors import UnsupportedError
from train.settings.config import Config, flat

Tracker = Callable[[int, Mapping[str, float]], None]
"""Called with a global step and its metrics."""
MLFLOW = ".mlflow"
"""Name of the file in the run folder that has the id of its MLflow run."""


def open_tracker(name: str, config: Config, step: int) -> Tracker:
    """Open a tracker at a global step.

    Raises:
        UnsupportedError: the tracker is not installed.
    """
    return TRACKERS[name](config, step) if name in TRACKERS else _of_transformers(name, config)


def _lacking(name: str) -> UnsupportedError:
    return UnsupportedError(f"log.trackers names {name}, which is not installed", "pip install 'vitruvian[trackers]'")


def _tensorboard(config: Config, step: int) -> Tracker:
    """TensorBoard, which drops later steps by itself (`purge_step`)."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise _lacking("tensorboard") from None
    writer = SummaryWriter(str(config.save.path / "runs"), purge_step=step + 1)

    def track(number: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, number)
        writer.flush()

    return track


def _wandb(config: Config, _: int) -> Tracker:
    """Weights & Biases; a resumed run keeps its id, which is the digest of its folder's path."""
    try:
        import wandb
    except ImportError:
        raise _lacking("wandb") from None
    from blake3 import blake3

    place = config.save.path.resolve()
    name = blake3(str(place).encode()).hexdigest(8)
    wandb_run: Any = wandb.init(
        id=name, name=place.name, dir=str(place), resume="allow", config=config.model_dump(mode="json")
    )

    def track(number: int, numbers: Mapping[str, float]) -> None:
        wandb_run.log(dict(numbers), step=number)

    return track


def _mlflow(config: Config, _: int) -> Tracker:
    """MLflow; a resumed run continues the MLflow run whose id is in its folder. Steps trained again appear twice."""
    try:
        mlflow: Any = import_module("mlflow")
    except ImportError:
        raise _lacking("mlflow") from None
    path = config.save.path / MLFLOW
    run_id = path.read_text().strip() if path.is_file() else None
    run = mlflow.start_run(run_id=run_id, run_name=None if run_id else config.save.path.resolve().name)
    if run_id is None:
        write_file(path, str(run.info.run_id).encode())
        settings = {name: str(value)[:500] for name, value in flat(config).items()}
        mlflow.log_params(settings)

    def track(number: int, numbers: Mapping[str, float]) -> None:
        mlflow.log_metrics(dict(numbers), step=number)

    return track


def _of_transformers(name: str, config: Config) -> Tracker:
    """A tracker that transformers supports, driven through the callback of its Trainer."""
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    try:
        callback: Any = INTEGRATION_TO_CALLBACK[name]()
    except (ImportError, RuntimeError):
        raise _lacking(name) from None
    place = str(config.save.path)
    arguments = TrainingArguments(output_dir=place, run_name=config.save.path.resolve().name, report_to="none")
    state, control = TrainerState(is_world_process_zero=True, is_local_process_zero=True), TrainerControl()
    callback.on_train_begin(arguments, state, control, model=None)

    def track(number: int, numbers: Mapping[str, float]) -> None:
        state.global_step = number
        callback.on_log(arguments, state, control, logs=dict(numbers), model=None)

    return track


TRACKERS: Mapping[str, Callable[[Config, int], Tracker]] = {
    "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow,
}  # fmt: skip
"""Trackers whose curves a resumed run continues."""
