"""Examples of each command of `train`: they are shown below its help, and parsed by a test."""

EXAMPLES = {
    "fetch": "--list\nmagpie-ultra data.jsonl --sample 1000 --seed 33",
    "lint": "data.jsonl",
    "tokenize": "--input data.jsonl --vocab-file model.model \\\n    --append-eod --output-prefix data\n"
    "--input chats.jsonl --tokenizer model \\\n    --chat-template chatml --append-eod --output-prefix chats",
    "show": "data_text_document --tokenizer model.model",
    "count": "data_text_document",
    "pack": "data_text_document --seq-length 8192",
    "role-bins": "--input data.jsonl --output-prefix data --vocab-file m.model",
    "packs state": "tokenized state.0.yaml",
    "packs slice": "--tokens-per-iter 4718592 --warmup-iters 2000 \\\n"
    "    --cd-phase 20 --max-tokens-per-pack 165150720000 \\\n"
    "    --out-dir sliced --slices-json slices.json --state-file state.0.yaml -n",
    "packs weights": "weights.yml slices.json",
    "packs merge": "sliced/U1_1 sliced/merged/U1_1",
    "packs iters": "sliced/merged",
    "packs append-eod": "sliced/merged/U1_1/U1_1.bin 48 append",
    "init": "run1 --from base --data data_text_document\n"
    "run2 --from-axolotl config.yml --from base \\\n    --data data_text_document",
    "plan": "run1/config.yml --ranks 64",
    "run": "run1/config.yml --optim.lr 1e-5",
    "submit": "run1/config.yml --site lumi --account PROJECT --nodes 24 -n",
    "doctor": "base",
    "eval": "run1/run --all",
    "plot": "run1/run",
    "chat": "model --prompt 'Sveiki!'",
    "bench": "model --tasks mmlu,gsm8k",
}
"""Command: its example lines, without the command; a line that ends in a backslash continues on the next."""
