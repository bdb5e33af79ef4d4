"""Answers to a few prompts at each evaluation, by greedy decoding.

All ranks compute the same forward pass, because the model is sharded over them. There is no key-value cache, so an
answer of n tokens takes n passes over the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from converters.assets.token_files import eos_ids, held_template
from formats.errors import UsageError
from train.data.rows import IGNORED, Flat
from train.data.tokens.records import Malformed, Record
from train.data.tokens.template_encoder import TemplateEncoder
from train.data.tokens.tokenizers import FILES, Fast, Vocabulary, open_vocabulary
from train.distributed import World
from train.model.trainee import Trainee
from train.run.evaluate import back_to_training
from train.settings.batching import shares
from train.settings.config import Config


class Prompts(NamedTuple):
    """Prompts to answer.

    Attributes:
        texts: the prompts of the settings.
        ids: the token ids of each prompt, with the chat template if the model has one.
        stops: ids of the tokens that end an answer.
        most: maximum number of tokens of an answer.
        vocabulary: the tokenizer.
    """

    texts: Sequence[str]
    ids: Sequence[Sequence[int]]
    stops: frozenset[int]
    most: int
    vocabulary: Vocabulary


class Answer(NamedTuple):
    """An answer: its prompt, its text, and whether it ended before the maximum number of tokens."""

    prompt: str
    text: str
    ended: bool


def open_prompts(config: Config) -> Prompts | None:
    """The prompts of the settings as token ids of the model; None if there are none.

    Raises:
        UsageError: the model has no tokenizer, or its chat template refuses a prompt.
    """
    texts, folder = config.evaluate.prompts, config.evaluate.tokenizer or config.model.path
    if not texts:
        return None
    names = [folder / name for name in FILES if (folder / name).is_file()] if folder.is_dir() else [folder]
    if not names:
        raise UsageError(f"evaluate.prompts need a tokenizer, and {folder} has none", "--evaluate.tokenizer FILE")
    vocabulary = open_vocabulary(names[0])
    beside = vocabulary.beside if isinstance(vocabulary, Fast) else {}
    template = held_template(beside)
    if template is None or not isinstance(vocabulary, Fast):
        ids = [row.tolist() for row in vocabulary.encode(texts)]
    else:
        encoder = TemplateEncoder(vocabulary, template, None)
        try:
            ids = [encoder.prompt(Record(["user"], [text])) for text in texts]
        except Malformed as error:
            raise UsageError(f"evaluate.prompts: {error.__cause__ or error}", "change the prompt") from None
    stops = frozenset(eos_ids(beside)) if beside else frozenset[int]()
    return Prompts(texts, ids, stops, config.evaluate.new_tokens, vocabulary)


def generate(
    trainee: Trainee, prompts: Prompts, world: World, alive: Callable[[], None] = lambda: None
) -> list[Answer]:
    """Answer all prompts with the current weights. Collective: all ranks call it.

    Args:
        trainee: the model.
        prompts: the prompts to answer.
        world: the ranks.
        alive: called before each token, to reset the watchdog.
    """
    answers: list[list[int]] = [[] for _ in prompts.ids]
    open_ones = list(range(len(answers)))
    trainee.eval()
    with torch.no_grad():
        for _ in range(prompts.most):
            alive()
            flat = _flat([[*prompts.ids[number], *answers[number]] for number in open_ones])
            predicted = torch.zeros(len(flat.labels), dtype=torch.int64, device=world.device)
            trainee(flat, world.device, predicted=predicted)
            tokens = predicted.cpu()[flat.cu_seqlens[1:] - 1].tolist()
            for number, token in zip(open_ones, tokens, strict=True):
                answers[number].append(token)
            open_ones = [number for number in open_ones if answers[number][-1] not in prompts.stops]
            if not open_ones:
                break
    back_to_training(trainee)
    known = prompts.vocabulary
    ends = [ids[-1] in prompts.stops for ids in answers]
    texts = [
        known.decode([token for token in ids[: len(ids) - end] if token < known.size])
        for ids, end in zip(answers, ends, strict=True)
    ]
    return [Answer(*parts) for parts in zip(prompts.texts, texts, ends, strict=True)]


def _flat(documents: Sequence[Sequence[int]]) -> Flat:
    """The documents as one row without a trained label."""
    sizes = [len(ids) for ids in documents]
    ids = np.concatenate([np.array(ids, np.int64) for ids in documents])
    positions = np.concatenate([np.arange(size) for size in sizes])
    return Flat(ids, np.full(len(ids), IGNORED), positions, np.array(shares(sizes), np.int32), max(sizes), 0)
