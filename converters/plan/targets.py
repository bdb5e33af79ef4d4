"""The plan of a conversion into each format: its weight files, the small files beside them, and notes for the user."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.assets import files as assets
from converters.assets.trusted import require_inside
from converters.plan import agreement, names
from converters.plan.plan import Plan, cast_dtype, cast_dtypes, make_plan
from converters.plan.request import Request
from formats.checkpoint import ASSETS, Checkpoint, Target
from formats.errors import RefusedError, UnsupportedError, UsageError
from formats.fsdp import FSDP
from formats.huggingface import HUGGINGFACE, mtp
from formats.huggingface import folder as huggingface
from formats.huggingface.config import dropouts
from formats.huggingface.require import require_class
from formats.layout.table import MTP
from formats.model import untabled
from formats.model.spec import ModelSpec, Spec, Verbatim
from formats.model.vocab_rows import grown, rows

if TYPE_CHECKING:
    from converters.assets.chat_template import Applied
    from formats import optimizer
    from formats.deepspeed.mds import optimizer as mds_optimizer
    from formats.deepspeed.mds import writer as mds_writer
    from formats.deepspeed.neox import writer as neox_writer
    from formats.huggingface.nanotron.optimizer_writer import Topology
    from formats.megatron.args.options import Options
    from formats.megatron.optimizer import Optimizer

Dtypes = Mapping[tuple[str, int | None], str]
"""The element type of each logical tensor."""
SHARD_SIZE = 5 * 10**9
"""Default bytes of a safetensors file."""
UNTOLD = (
    "no table says which names the model has in memory: where these differ (experts that are fused there), dcp.load "
    "does not find them"
)


def plan_huggingface(
    source: Checkpoint,
    request: Request,
    shard_size: int | None,
    template: str | None = None,
    quantize: str | None = None,
) -> Plan:
    """A plan that writes a Hugging Face folder.

    Args:
        source: the opened checkpoint.
        request: what the user asked for.
        shard_size: bytes of a file; without it, the tensors are in the files that the model had in Hugging Face.
        template: name or file of a chat template. The vocabulary grows by the tokens that it needs.
        quantize: `fp8-block` for linear layers in FP8 with a scale for each block.

    Raises:
        UsageError: both a cast and a quantization are asked for, and each decides the element types.
    """
    if quantize and request.cast:
        raise UsageError(f"--quantize {quantize} and --dtype contradict each other", "leave one of them out")
    require_vocab(source)
    saved, quantization = source, None
    if quantize:
        from converters.plan.quantizing import quantized, with_config

        source, quantization = quantized(source)
    if source.format != HUGGINGFACE.name and isinstance(source.spec, Verbatim):
        source = names.with_names_in_files(source, json.loads(assets.config_text(source, None)))
    dtypes = cast_dtypes(source, request.cast)
    index = assets.remembered_index(source.assets)
    index = index and huggingface.with_originals(index, source.spec)
    further = _further_copies(source, index)
    carried = assets.carried_assets(source)
    carried |= dict(assets.records(source.root)) if source.format == FSDP.name else {}
    spec, texts, notes = source.spec, {}, list[str]()
    if template is not None:
        applied = _apply_template(carried, template, rows(spec), source)
        spec = grown(spec, applied.rows_needed) if applied.rows_needed > (rows(spec) or 0) else spec
        carried = {name: path for name, path in carried.items() if name not in applied.removed}
        texts, notes = dict(applied.texts), list(applied.notes)
    elif source.added_tokens:
        added = ", ".join(source.added_tokens)
        notes.append(f"the training added {added} to its tokenizer; --chat-template adds them to the one that travels")
    same = index if shard_size is None else None
    target = huggingface.write(request.root, spec, dtypes, shard_size or SHARD_SIZE, same, further)
    config = assets.config_text(source, _cast_to(request), spec)
    if isinstance(spec, ModelSpec):
        require_class(json.loads(config), str((source.assets or source.root) / huggingface.CONFIG))
    notes += agreement.notes(saved, spec, config)
    notes += _dropout_notes(source, dropouts(json.loads(config)))
    if quantization:
        config = with_config(config, quantization)
    texts |= {**target.texts, "config.json": config}
    copies = {name: path for name, path in carried.items() if name not in texts} | assets.own_family(spec)
    plan = make_plan(source, replace(target, texts=texts, copies=copies), request.cast, spec)
    return replace(plan, notes=tuple(notes))


def _further_copies(source: Checkpoint, index: Mapping[str, Any] | None) -> set[str]:
    """The keys of copies of tensors that are written: those in the index, and those in MTP layers of the source.

    In Megatron's layers there are none of embedding and head, in the Hub's there are: without an index, all of them.
    """
    from formats.megatron.details import Megatron

    copies = [(placed.key, placed.slot) for placed in source.tensors]
    if index is None and isinstance(source.details, Megatron):
        copies = [(slot.keys[0], slot) for slot in huggingface.model_slots(source.spec)]
    in_layers = {key for key, slot in copies if slot.replica and MTP in slot.rule.conditions}
    return in_layers if index is None else in_layers | index["weight_map"].keys()


def _apply_template(carried: Mapping[str, Path], template: str, count: int | None, source: Checkpoint) -> Applied:
    from converters.assets.chat_template import apply_template, load_template

    if count is None:
        raise RefusedError(f"{source.root} has no embedding whose rows a chat template could be checked against")
    return apply_template(carried, load_template(template), count, source.added_tokens)


def plan_megatron(
    source: Checkpoint,
    request: Request,
    options: Options,
    iteration: int | None,
    tokens: int | None = None,
    optimizer: Optimizer | None = None,
    args: Mapping[str, Any] | None = None,
) -> Plan:
    """A plan that writes a Megatron run folder, with the model's config and tokenizer in it.

    Args:
        source: the opened checkpoint.
        request: what the user asked for.
        options: topology and dialect.
        iteration: the iteration to write; None for a release.
        tokens: the vocabulary size of Megatron-LLM's training, to which the rows grow.
        optimizer: the optimizer state that is written beside the weights, for a training that is resumed.
        args: arguments of a training that is resumed from another framework.
    """
    from formats.megatron import megatron_llm
    from formats.megatron.args import flags, providers
    from formats.megatron.args.options import DIST, FSDP_DTENSOR
    from formats.megatron.args.visions import VISIONS
    from formats.megatron.classic import FLAGS, write
    from formats.megatron.details import Megatron

    seen = isinstance(source.spec, Verbatim) and source.spec.family in VISIONS
    if seen and options.dialect == DIST and options.trainer:
        return _whole(source, request, options, iteration, args)
    spec = megatron_spec(source, options)
    require_vocab(source)
    if tokens is not None:
        if tokens < (spec.vocab or 0):
            raise RefusedError(f"{source.root} has {spec.vocab} tokens, --true-vocab-size {tokens} would cut some off")
        spec = replace(spec, vocab=tokens)
    dtypes = cast_dtypes(source, request.cast)
    saved = source.details if isinstance(source.details, Megatron) else None
    llm = [dialect == megatron_llm.NAME for dialect in (saved and saved.dialect, options.dialect)]
    args = assets.dropouts_of(source) | dict(args or (saved.args if saved and llm[0] == llm[1] else {}))
    remarks: Sequence[str] = ()
    if options.dialect == DIST:
        from formats.megatron.torch_dist import write

        remarks = providers.remarks(spec, options.version)
    elif options.dialect == FSDP_DTENSOR:
        from formats.megatron.fsdp_dtensor import notes as notes_of
        from formats.megatron.fsdp_dtensor import write

        remarks = notes_of(optimizer)
    target = write(request.root, spec, dtypes, options, args=args, iteration=iteration, optimizer=optimizer)
    texts, copies = _inside(source, request, ASSETS, spec)
    if options.dialect == megatron_llm.NAME:
        name = megatron_llm.TOKENIZER
        folders = [folder for folder in (source.assets, source.root) if folder and (folder / name).is_file()]
        places = [require_inside(folder / name, folder) for folder in folders]
        copies |= {name: places[0]} if places else {}
    plan = make_plan(source, replace(target, texts={**target.texts, **texts}, copies=copies), request.cast, spec)
    further = mtp.note(spec, dict(source.config or {}), source.dropped)
    notes = (*flags.remarks(target.texts.get(FLAGS, b"").decode()), *remarks, *filter(None, [further]))
    return replace(plan, notes=(*notes, *(megatron_llm.window_notes(spec) if llm == [False, True] else ())))


def megatron_spec(source: Checkpoint, options: Options) -> ModelSpec:
    """The spec of a model that is to be written in the layouts of Megatron-LM.

    Raises:
        UnsupportedError: no table describes the model.
    """
    from formats.huggingface.language_model import has_class
    from formats.megatron import lacking
    from formats.megatron.args import providers
    from formats.megatron.args.visions import LACKING, VISIONS

    if not isinstance(source.spec, Verbatim):
        return source.spec
    family, why = source.spec.family, lacking.REASONS.get(source.spec.family, source.spec.why)
    why += f"; {LACKING[family].why}" if family in LACKING and options.trainer else ""
    ways = [f"{providers.BRIDGE} writes it for Megatron-Bridge"] * (family in VISIONS)
    ways += ["--only text makes its language model alone"] * has_class(family)
    raise UnsupportedError(f"{source.root} has no Megatron layout: {why}", ", ".join([*ways, "see `convert formats`"]))


def _whole(
    source: Checkpoint, request: Request, options: Options, iteration: int | None, args: Mapping[str, Any] | None
) -> Plan:
    """A plan that writes a model of images for Megatron-Bridge."""
    from formats.megatron import torch_dist, vision_language
    from formats.megatron.args import visions
    from formats.megatron.details import Megatron

    text = assets.config_text(source, _cast_to(request))
    config, compared = json.loads(text), agreement.notes(source, source.spec, text)
    source = _in_files(source, config)
    assert isinstance(source.spec, Verbatim)
    on_hub = visions.of_kind(source.spec.family, options.version).on_hub
    source = names.with_names(source, config, {key: on_hub(key) for key in source.spec.shapes})
    assert isinstance(source.spec, Verbatim)
    model = vision_language.describe(source.spec, config, str(source.root), options.version)
    notes = model.notes(options.accepted)
    saved = source.details.args if isinstance(source.details, Megatron) else {}
    args, dtypes = assets.dropouts_of(source) | dict(args or saved), cast_dtypes(source, request.cast)
    target = torch_dist.write(request.root, model.text, dtypes, options, args=args, iteration=iteration, model=model)
    texts, copies = _inside(source, request, ASSETS)
    plan = make_plan(source, replace(target, texts={**target.texts, **texts}, copies=copies), request.cast)
    return replace(plan, notes=(*notes, *compared))


def _in_files(source: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint of a model without a table, under the names of Hugging Face files, with experts as on the Hub."""
    assert isinstance(source.spec, Verbatim)
    fused = untabled.FUSED_NOTE in source.spec.remarks
    return names.with_names_in_files(source, config) if fused or source.format != HUGGINGFACE.name else source


def plan_neox(source: Checkpoint, request: Request, options: neox_writer.Options) -> Plan:
    """A plan that writes a GPT-NeoX run folder, with the model's config and tokenizer in it."""
    from formats.deepspeed.neox import checkpoint as neox
    from formats.deepspeed.neox import writer, yml

    spec = in_tables(source, "GPT-NeoX")
    plan = _run(source, request, partial(writer.write, options=options), "GPT-NeoX")
    own = isinstance(source.details, neox.Neox)
    return replace(
        plan, notes=() if own else (*yml.notes(spec, yml.to_neox(spec, 1, 0, 1, {})), *_dropout_notes(source, {}))
    )


def plan_mds(
    source: Checkpoint, request: Request, options: mds_writer.Options, resumed: mds_optimizer.Resumed | None = None
) -> Plan:
    """A plan that writes a run folder of Megatron-DeepSpeed, with the model's config and tokenizer in it.

    Of an optimizer that is `resumed` the files are in it, and nothing fills them.
    """
    from formats.deepspeed.mds import writer

    plan = _run(source, request, partial(writer.write, options=options, resumed=resumed), "Megatron-DeepSpeed")
    return replace(plan, notes=tuple(_dropout_notes(source, {})))


def plan_nanotron(
    source: Checkpoint,
    request: Request,
    vocab_multiple: int,
    trained: optimizer.Optimizer | None = None,
    topology: Topology | None = None,
) -> Plan:
    """A plan that writes a checkpoint of nanotron, with the model's config and tokenizer in it.

    Args:
        source: the opened checkpoint.
        request: what the user asked for.
        vocab_multiple: what the vocabulary is padded to a multiple of, for each tensor parallel rank.
        trained: what is written beside the weights, for a training that resumes.
        topology: its parallel sizes.
    """
    from formats.huggingface.nanotron import special_tokens, writer

    config = json.loads(assets.config_text(source, None))
    options = {"vocab_multiple": vocab_multiple, "config": config, "optimizer": trained}
    write = partial(writer.write, **options, topology=topology or writer.ONE_RANK)
    notes = *special_tokens.notes(config), *_dropout_notes(source, {})
    return replace(_run(source, request, write, "nanotron"), notes=notes)


def _run(source: Checkpoint, request: Request, write: Callable[[Path, ModelSpec, Dtypes], Target], name: str) -> Plan:
    """A plan that writes a run folder of a trainer, with the model's config and tokenizer in it."""
    spec = in_tables(source, name)
    require_vocab(source)
    target = write(request.root, spec, cast_dtypes(source, request.cast))
    texts, copies = _inside(source, request, ASSETS)
    return make_plan(source, replace(target, texts={**target.texts, **texts}, copies=copies), request.cast)


def _dropout_notes(source: Checkpoint, written: Mapping[str, float]) -> Iterator[str]:
    """Notes on the dropout of a training, where the output does not name it.

    Args:
        source: the checkpoint, whose yml or config names it.
        written: the dropout probabilities of the output, under the names of Megatron's arguments.
    """
    for name, value in assets.dropouts_of(source).items():
        if value != written.get(name, 0):
            yield f"{name} = {value:g} of the source is not among the settings of the output: it is a training's choice"


def in_tables(source: Checkpoint, name: str) -> ModelSpec:
    """The spec of a model that is to be written in a format with tables.

    Raises:
        UnsupportedError: no table describes the model.
    """
    if isinstance(source.spec, Verbatim):
        raise UnsupportedError(f"{source.root} has no layout of {name}: {source.spec.why}", "see `convert formats`")
    return source.spec


def plan_mistral(source: Checkpoint, request: Request) -> Plan:
    """A plan that writes Mistral's own files, with config and tokenizer beside them."""
    from formats.huggingface.mistral import folder as mistral

    spec = in_tables(source, "Mistral's")
    require_vocab(source)
    target = mistral.write(request.root, spec, cast_dtypes(source, request.cast))
    carried = assets.carried_assets(source)
    texts = {**target.texts, "config.json": assets.config_text(source, _cast_to(request))}
    copies = {name: path for name, path in carried.items() if name not in texts}
    return make_plan(source, replace(target, texts=texts, copies=copies), request.cast)


def _inside(
    source: Checkpoint, request: Request, folder: str, spec: Spec | None = None
) -> tuple[dict[str, bytes], dict[str, Path]]:
    """The small files of a model, as texts and copies, for a folder inside the checkpoint of another framework."""
    own = assets.own_family(source.spec, f"{folder}/")
    if not source.assets:
        return {}, own
    copies = {
        f"{folder}/{name}": path for name, path in assets.carried_assets(source).items() if name != "config.json"
    } | own
    texts = {f"{folder}/config.json": assets.config_text(source, _cast_to(request), spec)}
    if source.format == HUGGINGFACE.name and not huggingface.has_only_pickles(source.root):
        texts[f"{folder}/{huggingface.INDEX}"] = assets.shard_map(source)
    elif (source.assets / huggingface.INDEX).is_file() and not source.settings.only:
        copies[f"{folder}/{huggingface.INDEX}"] = require_inside(source.assets / huggingface.INDEX, source.assets)
    return texts, copies


def plan_fsdp(
    source: Checkpoint,
    request: Request,
    ranks: int,
    trained: optimizer.Optimizer | None = None,
    *,
    trainer: str | None = None,
) -> Plan:
    """A plan that writes a DCP folder, with the model's config and tokenizer in it, and the optimizer state `trained`.

    Tensors get the names that a `trainer` of its own names has, if one is given.
    """
    from formats.fsdp import checkpoint as fsdp
    from formats.fsdp import native, whole_models

    require_vocab(source)
    config = assets.config_text(source, _cast_to(request))
    compared = agreement.notes(source, source.spec, config)
    untold, whole, deviations = False, None, native.notes(source.spec, trainer)
    if trainer and isinstance(source.spec, Verbatim) and source.spec.family in whole_models.tables(trainer):
        source = _in_files(source, json.loads(config))
        assert isinstance(source.spec, Verbatim)
        whole = whole_models.describe(source.spec, json.loads(config), str(source.root), trainer)
        deviations = whole_models.GELU.notes(source.settings.accept, trainer)
    elif isinstance(source.spec, Verbatim):
        source = names.with_copies_in_memory(source, json.loads(config))
        if source.format == HUGGINGFACE.name:
            untold = not names.has_names_in_memory(source, json.loads(config))
            source = names.with_names_in_memory(source, json.loads(config))
    dtypes = cast_dtypes(source, request.cast)
    target = fsdp.write(request.root, source.spec, dtypes, ranks, trained, trainer=trainer, whole=whole)
    texts = {**target.texts, "config.json": config}
    copies = {name: path for name, path in assets.carried_assets(source).items() if name not in texts}
    copies |= assets.own_family(source.spec)
    plan = make_plan(source, replace(target, texts=texts, copies=copies), request.cast)
    notes = dict.fromkeys((*plan.notes, *compared, *deviations, *([UNTOLD] if untold else ())))
    return replace(plan, notes=tuple(notes))


def plan_reading(source: Checkpoint) -> Plan:
    """A plan that reads every logical tensor once and writes nothing."""
    require_vocab(source)
    if source.unbounded:
        agreement.notes(source, source.spec, assets.config_text(source, None))
    return make_plan(source)


def require_vocab(source: Checkpoint, *notes: str) -> None:
    """Refuse a checkpoint of which only the padded vocabulary is known; notes on its tokenizer are part of the hint."""
    if source.spec.vocab is None and not isinstance(source.spec, Verbatim):
        raise RefusedError(
            f"the true vocabulary of {source.root} is unknown, it only holds {source.padded_vocab} padded rows",
            "; ".join(("add --vocab-size N, or --config with the model's Hugging Face folder", *notes)),
        )


def _cast_to(request: Request) -> str | None:
    return cast_dtype("F32", request.cast) if request.cast else None
