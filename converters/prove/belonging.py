"""Whether sound files make one checkpoint together: all of it, equal copies, and the optimizer of these weights."""

from __future__ import annotations

from converters.move.engine import digest_of
from converters.plan.names import as_trained
from converters.plan.request import Limits
from converters.plan.state_jobs import state_jobs
from converters.plan.targets import plan_reading
from formats.checkpoint import Checkpoint
from formats.errors import VitruvianError
from formats.registry import format_of
from formats.torch_files import dcp


def require_one_checkpoint(source: Checkpoint, limits: Limits) -> str:
    """Refuse files of several trainings, or not all files of one. Copies and FP32 master weights are read.

    Returns:
        What was not looked at; empty if nothing.

    Raises:
        SourceError: files are missing, or are not those of one save.
        VerificationError: copies of a tensor differ, or FP32 master weights are not those of the model.
        RefusedError: the vocabulary is unknown, so that copies cannot be compared.
        UnsupportedError: the optimizer is of a kind that is not read.
    """
    training, masters = format_of(source).training, dict[str, Checkpoint]()
    for folder in format_of(source).parts(source.root):
        if folder != source.home and dcp.is_dcp(folder):  # an optimizer's own: all of its pieces are located
            list(dcp.load(dcp.entries(folder)))
    listed = (source.home / dcp.METADATA).is_file()  # it lists all pieces of an optimizer, and their files
    trained = training is not None and training.is_trained(source)
    if training is not None and trained and not listed:  # also where the vocabulary is unknown
        masters = {state: of for state, of in training.states(as_trained(source))[0].items() if state == "fp32"}
    jobs = [*plan_reading(source).jobs, *state_jobs(source, masters)]
    digest_of([job for job in jobs if job.replicas or job.twins], limits, checked=False)
    return "only the pieces of the optimizer were counted; a conversion with it sees more" if trained and listed else ""


def has_optimizer(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has an optimizer, be it one that cannot be read."""
    training = format_of(checkpoint).training
    try:
        return "optimizer" in checkpoint.state or (training is not None and training.is_trained(checkpoint))
    except VitruvianError:
        return True
