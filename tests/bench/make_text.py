"""Text to tokenize: dialogues of made-up words, and a SentencePiece model trained on them.

    python -m tests.bench.make_text OUT [--megabytes 300] [--vocabulary 32000]

Words are made of syllables and drawn by Zipf's law; a third have letters beyond ASCII, as Baltic text has.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import accumulate
from pathlib import Path

SYLLABLES = "ka la mā ju te rīt sau ve ki pal die na ot ri s š up e gā li mi nu th ing er on an re st tion ed al o i"
LETTERS = "qu ble pro con de ment žu ļi ņa ģe ēr īs ūd vai cik par bez"
CONTROL = ["<|endoftext|>", "<|pad|>", "<|sep|>", "<|system|>", "<|user|>", "<|assistant|>"]
SENTENCES = 20_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    chosen = random.Random(1)
    syllables = f"{SYLLABLES} {LETTERS}".split()
    words = list({"".join(chosen.choices(syllables, k=chosen.randint(1, 5))) for _ in range(300_000)})
    weights = list(accumulate(1 / (place + 5) for place in range(len(words))))

    def sentence() -> str:
        joined = " ".join(chosen.choices(words, cum_weights=weights, k=chosen.randint(4, 20)))
        return joined.capitalize() + chosen.choice([".", "?", "!", ",\n", "..."])

    lines = [sentence() for _ in range(SENTENCES)]
    (args.out / "corpus.txt").write_text("\n".join(line.replace("\n", " ") for line in lines for _ in range(2)))
    train(args.out, args.vocabulary)
    with (args.out / "chat.jsonl").open("w") as file:
        while file.tell() < args.megabytes * 10**6:
            block = []
            for _ in range(1000):
                turns = []
                for _ in range(chosen.choice([1, 1, 1, 2])):
                    turns.append(("user", " ".join(chosen.choices(lines, k=chosen.randint(1, 2)))))
                    turns.append(("assistant", " ".join(chosen.choices(lines, k=chosen.randint(1, 5)))))
                text = "".join(f"<<<|{role}|>>>{sentences}<<<|{role}|>>>" for role, sentences in turns)
                block.append(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            file.writelines(block)


def train(out: Path, vocabulary: int) -> None:
    from sentencepiece import SentencePieceTrainer

    SentencePieceTrainer.train(
        input=str(out / "corpus.txt"), model_prefix=str(out / "spm"), vocab_size=vocabulary, model_type="bpe",
        byte_fallback=True, character_coverage=0.9995, unk_id=0, bos_id=1, eos_id=2, pad_id=-1, control_symbols=CONTROL,
        remove_extra_whitespaces=False, normalization_rule_name="identity", minloglevel=2,
    )  # fmt: skip


if __name__ == "__main__":
    main()
