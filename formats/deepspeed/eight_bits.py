"""Moments of the flat groups of ZeRO that bitsandbytes stores in 8 bits.

    {"step": 3, "__bnb_optimizer_quant_state__": {"state1": codes, "qmap1": their values, "absmax1": of each block, …}}

`state1` is Adam's first moment, `state2` its second; if a rank's part of a group has fewer than 4096 elements, the
moments are float32, without `qmap` and `absmax` (bitsandbytes 0.50.2 optim/optimizer.py; 0.47.0 has all entries beside
the step). LAMB has an `unorm_vec` too, and every optimizer with one moment has `state1` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from formats.disk.safetensors import Fragment, Scales
from formats.errors import SourceError
from formats.torch_files.archive import TorchFile
from formats.torch_files.pickle_values import TensorRef

QUANTIZED = "__bnb_optimizer_quant_state__"
MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}
"""The suffix of the names of a moment's tensors."""
METHOD, BLOCK = "bitsandbytes 8-bit", 256


class Codes(NamedTuple):
    """A moment in 8 bits: the code of each element, the value of each code, and the largest magnitude of each block."""

    state: Any
    qmap: Any
    absmax: Any


def torch_states(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The optimizer states of a flat group; the moments of bitsandbytes' Adam are under torch's names for them."""
    inner = state.get(QUANTIZED, state)
    if not isinstance(inner, Mapping) or "state2" not in inner or "state1" not in inner:
        return state
    rest = {name: value for name, value in {**state, **inner}.items() if name != QUANTIZED}
    states: dict[str, Any] = {}
    for moment, end in MOMENTS.items():
        codes = Codes(rest.pop(f"state{end}"), rest.pop(f"qmap{end}", None), rest.pop(f"absmax{end}", None))
        states[moment] = codes.state if codes.qmap is codes.absmax is None else codes
    return {**rest, **states}


def fragment_of(file: TorchFile, codes: Codes, name: str) -> Fragment:
    """A fragment that is read as the float32 elements of a moment in 8 bits.

    Raises:
        SourceError: codes, values and blocks do not fit each other.
    """
    if not all(isinstance(part, TensorRef) and len(part.shape) == 1 for part in codes):
        raise SourceError(f"{file.path} holds {name} in 8 bits in a form that is not known")
    state, qmap, absmax = (file.fragment(part, name) for part in codes)
    (count,) = state.shape
    layouts = (("U8", (count,)), ("F32", (256,)), ("F32", (-(-count // BLOCK),)))
    if tuple((part.dtype, part.shape) for part in (state, qmap, absmax)) != layouts:
        raise SourceError(
            f"{file.path} holds {name} in 8 bits, with other numbers of values or blocks than it has elements"
        )
    scales = Scales(METHOD, absmax, (1, BLOCK), 1, count, "absmax", values=qmap)
    return state._replace(dtype="F32", scales=scales)
