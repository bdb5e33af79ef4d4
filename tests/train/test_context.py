"""Rows that ranks share: losses, gradients and scores of one rank, in families with windows and latents too."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from train.data.parts import cut
from train.data.rows import IGNORED, open_rows
from train.model.context import sdpa
from train.settings.config import Data

NEAR = 1e-5
SHARED = ["--parallel.context", 2]


def require_same(ran, reference):
    assert ran.code == 0, ran.out
    for series in ("loss", "grad_norm", "trained_tokens"):
        assert ran.series(series) == pytest.approx(reference.series(series), abs=NEAR), series
    for series in (name for name in reference.lines[0] if name.startswith("grad_norm/")):
        assert ran.series(series) == pytest.approx(reference.series(series), abs=NEAR), series


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_ranks_that_share_rows_are_as_one(settings, run, data, talker):
    config = settings(
        model={"path": str(talker)}, log={"layer_norms": True}, steps={"train_iters": 4},
        data={"validation": {"eu": str(data)}}, evaluate={"metrics": ["bleu"], "every": 4, "max_rows": 3},
    )  # fmt: skip
    reference = run(config, save="whole")
    assert reference.code == 0, reference.out
    half = run(config, *SHARED, "--steps.exit_interval", 2, ranks=2, save="shared")
    assert "8 rows = 2 micro x 4 accumulation x 1 ranks, each shared by 2" in half.out, half.out
    shared = run(config, *SHARED, ranks=4, save="shared")
    require_same(shared, reference)
    first, second = (json.loads((result.save / "evaluations.jsonl").read_text()) for result in (reference, shared))
    assert first == pytest.approx(second, abs=1e-5)


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "changes"), [("mistral", {"sliding_window": 6}), ("deepseek_v3", {})])
def test_windows_and_latents(settings, run, model, name, changes):
    config = settings(name, steps={"train_iters": 2}, model={"path": str(model(name, vocab_size=253, **changes))})
    require_same(run(config, *SHARED, ranks=2, save="shared"), run(config, save="whole"))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "message"),
    [("gpt_oss", "the attention auto does not compute gpt_oss in float32 on cpu here over 2 ranks"),
     ("qwen3_next", "has layers that carry a state from token to token")],
)  # fmt: skip
def test_families_that_cannot_share_rows(settings, run, name, message):
    refused = run(settings(name), *SHARED, ranks=2)
    assert refused.code in (2, 4), refused.out
    assert message in refused.out


def test_parts_are_the_rows(data):
    rows = open_rows(Data(train=[data], seq_length=64), [data], 1234)
    flat = rows.flat([0, 1, 2])
    for parts in (2, 3, 7):
        shares = [cut(flat, part, parts) for part in range(parts)]
        count = len(flat.input_ids)
        for name in ("input_ids", "labels", "position_ids"):
            assert np.array_equal(
                np.concatenate([getattr(share, name) for share in shares])[:count], getattr(flat, name)
            )
        assert sum(share.trained for share in shares) == flat.trained == int((flat.labels != IGNORED).sum())
        assert sum(share.tokens for share in shares) == flat.tokens
        assert len({len(share.input_ids) for share in shares}) == 1
        document = np.repeat(np.arange(len(flat.cu_seqlens) - 1), np.diff(flat.cu_seqlens))
        for share in shares[:-1]:
            assert share.keys.stop - share.keys.begin == share.keys.cu_seqlens[-1]
            assert share.keys.begin == flat.cu_seqlens[document[share.keys.stop - len(share.input_ids)]]
    empty = rows.flat([])
    assert [cut(empty, part, 3).tokens for part in range(3)] == [0, 0, 0]


def test_the_attention_over_documents_sees_what_it_should(monkeypatch):
    monkeypatch.setattr("train.model.context.QUERIES", 3)
    torch.manual_seed(1)
    query, key, value = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    output, _ = sdpa(None, query, key, value, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends, sliding_window=4)
    last = {"cu_seq_lens_q": torch.tensor([0, 4], dtype=torch.int32), "cu_seq_lens_k": torch.tensor([0, 7])}
    part, _ = sdpa(None, query[:, :, 8:], key[:, :, 5:], value[:, :, 5:], None, sliding_window=4, **last)
    assert torch.allclose(part, output[:, 8:], atol=1e-6)
    visible = torch.ones(12, 12).tril().bool() & (torch.arange(12)[:, None] - torch.arange(12) < 4)
    visible[5:, :5] = False
    keys, values = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
    scores = (query @ keys.transpose(2, 3) / 8**0.5).masked_fill(~visible, -torch.inf)
    assert torch.allclose(output, (scores.softmax(-1) @ values).transpose(1, 2), atol=1e-6)
