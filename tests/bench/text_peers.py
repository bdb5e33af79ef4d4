"""What tokenization is compared with, on all cores.

python -m tests.bench.text_peers bound FOLDER OUT   SentencePiece alone: spans are in memory, ids thrown away
python -m tests.bench.text_peers imap FOLDER OUT    a pool, a document at a time, as GPT-NeoX tokenizes
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import time
from pathlib import Path

import numpy as np

MARKS = re.compile(r"(<<<\|user\|>>>|<<<\|assistant\|>>>)")
LOADED = {}


def load(folder: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    LOADED["model"] = SentencePieceProcessor(model_file=str(folder / "spm.model"))


def spans(line: str) -> list[str]:
    return [part for part in MARKS.split(json.loads(line)["text"]) if part.strip()]


def encode_all(folder: Path, number: int, of: int, ready, out) -> None:
    """One process's share, in batches of 2000 documents as `train tokenize` has them."""
    load(folder)
    lines = (folder / "chat.jsonl").read_text().splitlines()[number::of]
    batches = [
        [part for line in lines[low : low + 2000] for part in spans(line) if not MARKS.fullmatch(part)]
        for low in range(0, len(lines), 2000)
    ]
    del lines
    ready.wait()
    began = time.perf_counter()
    for batch in batches:
        LOADED["model"].encode(batch, num_threads=1)
    out.put((began, time.perf_counter()))


def bound(folder: Path, out: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    ready, queue = multiprocessing.Barrier(cores), multiprocessing.Queue()
    shares = [(folder, number, cores, ready, queue) for number in range(cores)]
    processes = [multiprocessing.Process(target=encode_all, args=share) for share in shares]
    for process in processes:
        process.start()
    times = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    out.write_text(str(max(end for _, end in times) - min(begin for begin, _ in times)))


def encode(line: str) -> list[int]:
    model, ids = LOADED["model"], []
    for part in spans(line):
        if MARKS.fullmatch(part):
            ids.append(model.piece_to_id(part.replace("<<<", "<").replace(">>>", ">")))
        else:
            ids += model.encode(part)
    return [*ids, model.piece_to_id("<|endoftext|>")]


def imap(folder: Path, out: Path) -> None:
    """Documents go to workers and lists come back, in chunks of 25; one process writes each document."""
    sizes = []
    with (
        multiprocessing.Pool(len(os.sched_getaffinity(0)), load, (folder,)) as pool,
        (folder / "chat.jsonl").open() as file,
        out.open("wb") as tokens,
    ):
        for ids in pool.imap(encode, file, chunksize=25):
            tokens.write(np.array(ids, dtype=np.uint16).tobytes(order="C"))
            sizes.append(len(ids))
    np.array(sizes, np.int32).tofile(str(out) + ".idx")


if __name__ == "__main__":
    {"bound": bound, "imap": imap}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
