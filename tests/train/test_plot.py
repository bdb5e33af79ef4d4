"""`train plot`: what is drawn is what the logs say, and the file is an image."""

from __future__ import annotations

import json
import struct
import zlib

import numpy as np
import pytest

from formats.errors import SourceError
from train.tools.plot import DPI, HEIGHT, WIDTH, ceiling, draw, read_history, smoothed


def write(folder, name, first, steps=50, texts=False):
    """A run's logs: a step each, an evaluation every tenth."""
    run = folder / name
    run.mkdir()
    log = [
        {
            "step": step,
            "global_step": first + step,
            "loss": 5 - 0.01 * (first + step),
            "lr": 1e-4,
            "grad_norm": 1 / step,
        }
        for step in range(1, steps + 1)
    ]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    evaluations = []
    for line in log[9::10]:
        scores = {"en_loss": line["loss"] + 0.1, "eu_new_loss": line["loss"] + 0.2}
        if texts:
            scores |= {"en_rouge1": 0.5, "en_rougeLsum": 0.4, "en_bleu": 30.0}
        evaluations.append({"step": line["step"], "global_step": line["global_step"]} | scores)
    (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    return run, log, evaluations


def image(path):
    """Width, height and pixels of a PNG, read by nobody's library: chunks with their sums, rows with their filters."""
    raw = path.read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    place, packed, size = 8, b"", (0, 0)
    while place < len(raw):
        length, kind = struct.unpack(">I4s", raw[place : place + 8])
        body = raw[place + 8 : place + 8 + length]
        assert zlib.crc32(kind + body) == struct.unpack(">I", raw[place + 8 + length : place + 12 + length])[0]
        if kind == b"IHDR":
            size = struct.unpack(">II", body[:8])
        packed += body if kind == b"IDAT" else b""
        place += 12 + length
    pixels = zlib.decompress(packed)
    assert len(pixels) == size[1] * (1 + 4 * size[0])
    return size


def test_curves_are_the_logs(tmp_path):
    run, log, evaluations = write(tmp_path, "phase", 100, texts=True)
    history = read_history(run)
    assert history.name == "phase"
    for name in ("loss", "lr", "grad_norm"):
        assert history.steps[name] == {line["global_step"]: line[name] for line in log}
    assert history.scores["loss"] == {
        name: {line["global_step"]: line[f"{name}_loss"] for line in evaluations} for name in ("en", "eu_new")
    }
    assert set(history.scores["rouge"]) == {"en rouge1", "en rougeLsum"}
    assert history.scores["bleu"] == {"en": {line["global_step"]: 30.0 for line in evaluations}}


def test_a_step_that_was_evaluated_again_and_a_line_half_written(tmp_path):
    run, log, _ = write(tmp_path, "run", 0)
    with (run / "evaluations.jsonl").open("a") as file:
        file.write('{"step": 10, "global_step": 10, "en_loss": 1.5}\n')
    with (run / "log.jsonl").open("a") as file:
        file.write('{"step": 51, "glo')
    history = read_history(run)
    assert history.scores["loss"]["en"][10] == 1.5
    assert len(history.steps["loss"]) == len(log)
    lines = (run / "log.jsonl").read_text().splitlines()
    (run / "log.jsonl").write_text("\n".join([*lines[:3], "{", *lines[3:]]))
    with pytest.raises(SourceError, match=r"line 4 of .*log\.jsonl is not a record of a step"):
        read_history(run)


def test_what_is_drawn(tmp_path, monkeypatch):
    """The lines of the figure hold the numbers of the log: two phases, a set each, in one panel."""
    from matplotlib.figure import Figure

    (first, log, evaluations), (second, after, _) = write(tmp_path, "U1", 0), write(tmp_path, "U2", 50)
    figures = []
    real = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kwargs: (figures.append(self), real(self, *args, **kwargs))
    )
    draw([read_history(first), read_history(second)], tmp_path / "out.png")
    assert image(tmp_path / "out.png") == (int(WIDTH * DPI), round(3 * HEIGHT * DPI))
    loss, rate, norm = figures[0].axes
    lines = {line.get_label(): np.stack(line.get_data()).tolist() for line in loss.lines}
    assert set(lines) == {"U1 train", "U1 en", "U1 eu_new", "U2 train", "U2 en", "U2 eu_new"}
    assert lines["U1 train"] == [[line["global_step"] for line in log], [line["loss"] for line in log]]
    assert lines["U2 train"] == [[line["global_step"] for line in after], [line["loss"] for line in after]]
    assert lines["U1 en"] == [
        [line["global_step"] for line in evaluations],
        [line["en_loss"] for line in evaluations],
    ]
    assert [len(axis.lines) for axis in (rate, norm)] == [2, 2]
    assert [axis.get_ylabel() for axis in figures[0].axes] == ["loss", "learning rate", "gradient norm"]


def test_many_steps_are_smoothed_peaks_are_cut_off_and_the_last_value_is_a_number(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    run, log, _ = write(tmp_path, "long", 0, 400)
    log[200]["grad_norm"] = 50.0
    (run / "log.jsonl").write_text(
        "".join(json.dumps(line | {"grad_norm": max(line["grad_norm"], 0.5)}) + "\n" for line in log)
    )
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: figures.append(self))
    draw([read_history(run)], tmp_path / "out.png")
    draw([read_history(run)], tmp_path / "out.png", log=True)
    loss, rate, norm = figures[0].axes
    raw, mean = loss.lines[:2]
    assert (raw.get_linewidth(), list(raw.get_ydata())) == (0.5, [line["loss"] for line in log])
    assert mean.get_ydata() == pytest.approx(smoothed([line["loss"] for line in log]))
    assert len(rate.lines) == 1  # it is what it is
    assert norm.get_ylim() == (0.0, 0.75)
    labels = {text.get_text() for axis in figures[0].axes for text in axis.texts}
    assert {"2 above, up to 50", f"{mean.get_ydata()[-1]:.3g}"} <= labels
    assert [len(figure.legends) for figure in figures] == [1, 1]
    assert not any(axis.get_legend() for axis in figures[0].axes)
    assert [axis.get_yscale() for axis in figures[1].axes] == ["log", "linear", "log"]


def test_means_and_ceilings():
    assert smoothed([1.0] * 100) == [1.0] * 100
    assert smoothed([1.0, 2.0]) == [1.0, 2.0]
    assert smoothed([0.0, 0.0, 8.0] + [0.0] * 77)[1:4] == pytest.approx([8 / 3] * 3)
    assert ceiling([]) is None
    assert ceiling([1.0] * 99 + [2.0]) is None
    assert ceiling([1.0] * 199 + [9.0]) == 1.5


def test_the_command(train, tmp_path):
    run, *_ = write(tmp_path, "run", 100, texts=True)
    ran = train("plot", run)
    assert (ran.code, ran.out) == (0, f"{run / 'plot.png'}\n")
    assert image(run / "plot.png") == (1600, round(5 * HEIGHT * DPI))
    assert train("plot", run).code == 0  # its own place is drawn again
    refused = train("plot", run, "-o", run / "plot.png")
    assert refused.code == 7
    assert train("plot", run, "-o", run / "plot.png", "--force").code == 0
    none = train("plot", tmp_path)
    assert none.code == 3
    assert "has no log.jsonl with a step in it" in none.err
