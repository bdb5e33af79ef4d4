"""Find what names and sizes do not tell by running a tiny model: the input of a norm, the order of parts of a tensor.

Each answer follows from mathematics alone: with one token only values matter, the gradient of a query of one token is a
multiple of one vector, an MLP is linear in `up`, and a rotation moves an element to its partner.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from converters.draft.probes import BY_HAND
from formats.errors import UnsupportedError
from formats.layout.lowering import lower
from formats.layout.pattern import parse

if TYPE_CHECKING:
    from converters.draft.probes import Model

ATTENTION = re.compile(r"attn|attention")
NORM = re.compile(r"(?i)norm|^ln")
SLIGHT = 1e-4
"""A fraction of the largest element, below which a difference is due to rounding."""
EQUAL = 1e-5
"""A fraction of the largest logit: how far apart the logits of one model may be."""


@contextmanager
def single_threaded() -> Iterator[None]:
    """A context in which torch uses one thread: faster for a tiny model, above all beside other programs."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def without_warnings() -> Iterator[None]:
    """A context without the warnings and progress bars of frameworks, which are of no use for a tiny model."""
    from transformers.utils import logging as progress

    logging.disable(logging.WARNING)
    progress.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        progress.enable_progress_bar()  # type: ignore[no-untyped-call]


def tiny_model(model: Model, **changes: Any) -> Any:
    """The tiny model with random weights."""
    import torch

    config, _ = model.tiny(**changes)
    config._attn_implementation = config._experts_implementation = "eager"  # noqa: SLF001  # works with any size
    torch.manual_seed(0)
    built = model.built(config, "cpu").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if NORM.search(name):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.08, generator=generator)
    return built


def logits(model: Any, length: int = 17) -> Any:
    """The logits of a model for two random texts: [2, length, vocab].

    Raises:
        UnsupportedError: the model's class cannot compute with these sizes.
    """
    import torch

    ids = torch.randint(3, model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))
    try:
        return model(input_ids=ids, use_cache=False).logits
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"a tiny {type(model).__name__}, in which every size is another number, computes nothing: {error}",
            BY_HAND,
        ) from error


def blocks(model: Any) -> dict[str, Any]:
    """The modules directly below the layers of a model, by name, for all layers."""
    modules = {name: module for name, module in model.named_modules() if re.search(r"(?:^|\.)\d+\.\w+$", name)}
    return {name: module for name, module in modules.items() if ".experts." not in name}


def norms(model: Any) -> dict[str, str]:
    """The role of each norm, by its name with `{layer}`: `input_norm`, `post_norm`, `output_norm` or `down_norm`.

    A norm whose input is the output of attention or of an MLP is the `output_norm` or `down_norm`; a norm whose input
    is the residual is the `input_norm` before attention, and after attention the `post_norm`, before the MLP. What a
    block gives that adds the residual itself is the residual.
    """
    import torch

    adding = _adding(model)
    made: dict[int, str] = {}
    alive: list[Any] = []
    roles: dict[str, str] = {}

    def note(name: str) -> Callable[..., None]:
        layer, last = re.split(r"\.(?=\w+$)", name)
        key = re.sub(r"\.\d+$", ".{layer}", layer) + f".{last}"

        def hook(_: Any, given: Any, named: Any, output: Any) -> None:
            first = next(iter([*given, *named.values()]))
            result = _first(output)
            alive.extend([first, result])  # so that no other tensor has its id
            if not NORM.search(last):
                made[hash(layer)] = "after"
                if name not in adding:
                    made[id(result)] = "attention" if ATTENTION.search(last) else "mlp"
                return
            after = {"attention": "output_norm", "mlp": "down_norm"}.get(made.get(id(first), ""))
            roles[key] = after or ("post_norm" if hash(layer) in made else "input_norm")

        return hook

    hooks = [block.register_forward_hook(note(name), with_kwargs=True) for name, block in blocks(model).items()]
    with torch.no_grad():
        logits(model)
    for block in hooks:
        block.remove()
    return roles


def _adding(model: Any) -> set[str]:
    """The blocks that add the residual themselves: their output is not zero where all of their parameters are."""
    import torch

    still, adding = copy.deepcopy(model), set[str]()

    def note(name: str) -> Callable[..., None]:
        return lambda _, __, output: adding.update({name} if _first(output).abs().max() > 0 else ())

    with torch.no_grad():
        for name, block in blocks(still).items():
            if not NORM.search(name.rpartition(".")[2]):
                for parameter in block.parameters():
                    parameter.zero_()
                block.register_forward_hook(note(name))
        logits(still)
    return adding


def _first(output: Any) -> Any:
    """What a block gives, without what comes beside it."""
    return output[0] if isinstance(output, tuple | list) else output


def is_order(pattern: str, sizes: Mapping[str, int], model: Any, name: str) -> bool:
    """Whether a fused tensor of queries, keys and values has its rows in the order of a pattern.

    Args:
        pattern: the pattern.
        sizes: the size of each axis.
        model: a tiny model of one layer.
        name: the name of the tensor in the model.
    """
    import torch

    weight = dict(model.named_parameters())[name]
    rows_of = _rows(pattern, sizes, [*weight.shape])

    def gradient(length: int) -> Any:
        model.zero_grad()
        logits(model, length)[:, -1].square().sum().backward()
        matrix = weight.grad.flatten(1) if weight.dim() > 1 else weight.grad[:, None]
        return matrix if len(matrix) == sum(map(len, rows_of.values())) else matrix.T

    moved = gradient(1).abs().amax(1)
    values = torch.nonzero(moved > SLIGHT * moved.max()).flatten().tolist()
    if values != sorted(rows_of["value"]):
        return False
    if weight.dim() == 1:
        return True  # the rows of a bias are in the order of its matrix
    many = gradient(9)
    ranks = {part: int(torch.linalg.matrix_rank(many[rows_of[part]], rtol=SLIGHT)) for part in ("query", "key")}
    return ranks["query"] <= 2 < ranks["key"]  # two texts, whose last tokens are the queries


def _rows(pattern: str, sizes: Mapping[str, int], shape: Sequence[int]) -> dict[str, list[int]]:
    """The rows of each logical tensor in a fused tensor of a shape."""
    import numpy as np

    rows_of: dict[str, list[int]] = {}
    wide = shape.index(sizes["hidden"], 1 if shape[0] != sizes["hidden"] else 0) if len(shape) > 1 else None
    for leaf in lower(parse(pattern), dict(sizes), {}):
        at = np.array([leaf.base])
        for span in leaf.spans:
            at = (at[:, None] + span.stride * np.arange(span.start, span.stop)).ravel()
        rows = np.unravel_index(at, tuple(shape))[1 - wide if wide is not None else 0]
        rows_of[leaf.tensor.removesuffix("_bias")] = sorted({*map(int, rows)})
    return rows_of


def gated_order(model: Any, name: str, dim: int) -> tuple[bool, bool] | None:
    """Whether the rows of gate and up alternate, and whether the gate is first; None where that cannot be told.

    Args:
        model: a tiny model.
        name: the name of the tensor in the model.
        dim: the dimension along which the tensor has both.
    """
    import torch

    layer = re.match(r".*?\.\d+(?=\.)", name)
    assert layer is not None
    rest = name[layer.end() + 1 :].partition(".")[0]
    block, weight, kept = dict(model.named_modules())[f"{layer[0]}.{rest}"], dict(model.named_parameters())[name], []
    hook = block.register_forward_hook(lambda _, __, output: kept.append(_first(output)))

    def linear(part: Any) -> bool:
        was, change = part.clone(), torch.randn(part.shape, generator=torch.Generator().manual_seed(2)) / 64
        for step in (0, 1, 2):
            part.copy_(was + step * change)
            logits(model, 3)
        part.copy_(was)
        first_output, middle, last = kept[-3:]
        return bool((last - 2 * middle + first_output).abs().max() < SLIGHT * (last - first_output).abs().max())

    with torch.no_grad():
        rows = weight.movedim(dim, 0)
        linear_parts = [[linear(part) for part in parts] for parts in (rows.chunk(2), (rows[::2], rows[1::2]))]
    hook.remove()
    orders = [(bool(turns), not first) for turns, (first, second) in enumerate(linear_parts) if first != second]
    return orders[0] if len(orders) == 1 else None


class Rotation(NamedTuple):
    """Which elements of a head rotary embeddings rotate.

    Attributes:
        neighbours: whether an element rotates with the next one, and not with the one half of the part further on.
        part: whether it is the first part of a head, and not all of it; true also where the config may make it so.
    """

    neighbours: bool
    part: bool


def rotation(model: Any) -> Rotation | None:
    """Which elements of a head the rotary embeddings of a model rotate; None where that cannot be told."""
    import torch

    rotate = getattr(inspect.getmodule(type(model)), "apply_rotary_pos_emb", None)
    angles = next((module for name, module in model.named_modules() if name.endswith("rotary_emb")), None)
    if rotate is None or angles is None:
        return None
    head = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    units = torch.eye(head)[None, None]
    try:
        cos, sin = angles(torch.zeros(1, 1, 1), torch.full((1, head), 100))
        moved = rotate(units, units, cos, sin)[0].reshape(head, head)
    except (TypeError, RuntimeError, ValueError):  # a rotation of another kind
        return None
    partners = [
        [at for at in torch.nonzero(row.abs() > 0).flatten().tolist() if at != i] for i, row in enumerate(moved)
    ]
    rotated = sum(len(at) == 1 for at in partners)
    found = [bool(turns) for turns in (0, 1) if partners == _partners(head, rotated, neighbours=bool(turns))]
    may_be_part = "partial_rotary_factor" in model.config.rope_parameters
    return Rotation(found[0], rotated < head or may_be_part) if len(found) == 1 else None


def _partners(head: int, rotated: int, *, neighbours: bool) -> list[list[int]]:
    """For each element of a head the elements that it rotates with, if the first `rotated` elements do."""
    if neighbours:
        return [[i ^ 1] if i < rotated else [] for i in range(head)]
    return [[(i + rotated // 2) % rotated] if i < rotated else [] for i in range(head)]
