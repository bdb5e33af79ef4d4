"""Hybrids whose pattern of layers marks the pipeline stages, as Megatron-LM 0.19 has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.megatron.pipeline import Chunk, chunks, pipeline_of
from tests.megatron_runs import with_args


@pytest.mark.parametrize(
    ("pattern", "virtual", "expected"),
    [
        ("M*-|ME-", 1, [(0, 0, range(3)), (1, 0, range(3, 6))]),
        ("M*|-ME-", 1, [(0, 0, range(2)), (1, 0, range(2, 6))]),
        ("M|*-|M|E-", 2, [(0, 0, range(1)), (1, 0, range(1, 3)), (0, 1, range(3, 4)), (1, 1, range(4, 6))]),
    ],
)
def test_the_stages_of_a_pattern(pattern, virtual, expected):
    """As `select_pipeline_segment` of megatron-core 0.19.2 chooses them: segment `virtual` * stages + stage."""
    pipeline = pipeline_of({"hybrid_layer_pattern": pattern}, 2, virtual, Path("args"))
    last = len(expected) - 1
    assert chunks(pipeline, 6) == [Chunk(*chunk, at == 0, at == last) for at, chunk in enumerate(expected)]


@pytest.mark.parametrize(("stages", "pattern"), [([], "M-|*E"), (["--first-stage-layers", 1], "M|-*E")])
def test_a_pattern_with_stages_is_read(model, convert, tmp_path, stages, pattern):
    source = model("nemotron_h")
    assert convert("hf2megatron", source, tmp_path / "run", "--pp", 2, *stages).code == 0
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    marked = with_args(tmp_path / "run", tmp_path / "marked", *ends, **dict.fromkeys(names, pattern))
    assert convert("diff", marked, source).code == 0


@pytest.mark.parametrize("pattern", ["M|-*E", "M-*|E", "M|-|*E"])
def test_other_stages_than_those_of_the_files_are_refused(model, convert, tmp_path, pattern):
    assert convert("hf2megatron", model("nemotron_h"), tmp_path / "run", "--pp", 2).code == 0
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    marked = with_args(tmp_path / "run", tmp_path / "marked", **dict.fromkeys(names, pattern))
    ran = convert("megatron2hf", marked, tmp_path / "out")
    assert ran.code == 3, ran.err
