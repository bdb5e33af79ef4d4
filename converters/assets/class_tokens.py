"""The special tokens that a class of tokenizers adds although no file of the model names them.

Facts: transformers 5.23.0 and 4.57.6, models/*/tokenization_*.py (the defaults of each `__init__`, of the classes that
read a tokenizer.json) and models/auto/tokenization_auto.py (the class of a model type). A token that one of them adds
counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

TABLE = """
Albert FNet RemBert | bos=[CLS] eos=[SEP] unk=<unk> sep=[SEP] pad=<pad> cls=[CLS] mask=[MASK] | albert fnet
    nystromformer rembert yoso
Bart Barthez Blenderbot LED LayoutLMv3 LayoutXLM Longformer MarkupLM Mvp Roberta XLMRoberta | bos=<s> eos=</s>
    unk=<unk> sep=</s> pad=<pad> cls=<s> mask=<mask> | bart barthez blenderbot bridgetower clap data2vec-text
    florence2 gte ibert jina_embeddings_v3 kosmos-2 layoutlmv3 layoutxlm led lilt longformer markuplm mega metaclip_2
    mra mvp roberta roberta-prelayernorm trocr xlm-roberta xlm-roberta-xl xmod
Bert ConvBert DPRContextEncoder DPRQuestionEncoder DPRReader DistilBert Electra LayoutLM LayoutLMv2 Lxmert MobileBert
    RoFormer SqueezeBert | unk=[UNK] sep=[SEP] pad=[PAD] cls=[CLS] mask=[MASK] | align bark bert blip bros
    chinese_clip convbert distilbert dpr electra ernie flava git grounding-dino layoutlm layoutlmv2 lxmert
    megatron-bert mm-grounding-dino mobilebert nezha nomic_bert qdqbert realm retribert roformer squeezebert tvp vilt
    visual_bert
BigBird | bos=<s> eos=</s> unk=<unk> sep=[SEP] pad=<pad> cls=[CLS] mask=[MASK] | big_bird
BlenderbotSmall CodeGen GPT2 Whisper | bos=<|endoftext|> eos=<|endoftext|> unk=<|endoftext|> | blenderbot-small blip-2
    codegen dbrx emu3 exaone4 flex_olmo gpt2 gpt_bigcode gpt_neo gptj granite granitemoe granitemoehybrid
    granitemoeshared hyperclovax_vision_v2! instructblip instructblipvideo jais2 minimax olmo3 opt phi starcoder2
    whisper
Bloom Nougat | bos=<s> eos=</s> unk=<unk> pad=<pad> | bloom nougat pp_formulanet
CLIP | bos=<|startoftext|> eos=<|endoftext|> unk=<|endoftext|> pad=<|endoftext|> | aimv2 clip clipseg groupvit
    omdet-turbo oneformer owlv2 owlvit sam3 sam3_video xclip
Camembert | bos=<s> eos=</s> unk=<unk> sep=</s> pad=<pad> cls=<s> mask=<mask> +=<s>NOTUSED +=</s>NOTUSED
    +=<unk>NOTUSED | camembert
CodeLlama | bos=<s> eos=</s> unk=<unk> prefix=▁<PRE> middle=▁<MID> suffix=▁<SUF> eot=▁<EOT> fill=<FILL_ME> |
    code_llama
Cohere | bos=<BOS_TOKEN> eos=<|END_OF_TURN_TOKEN|> unk=<UNK> sep=<SEP> pad=<PAD> cls=<CLS> mask=<MASK_TOKEN> |
    aya_vision cohere cohere2
Cpm XLNet | bos=<s> eos=</s> unk=<unk> sep=<sep> pad=<pad> cls=<cls> mask=<mask> +=<eop> +=<eod> | cpm xlnet
Deberta DebertaV2 | bos=[CLS] eos=[SEP] unk=[UNK] sep=[SEP] pad=[PAD] cls=[CLS] mask=[MASK] | deberta deberta-v2
Esmc | eos=<eos> unk=<unk> pad=<pad> cls=<cls> mask=<mask> chain_break=| | esmc esmfold2
Funnel | bos=<s> eos=</s> unk=<unk> sep=<sep> pad=<pad> cls=<cls> mask=<mask> | funnel
GPTNeoX | bos=<|endoftext|> eos=<|endoftext|> unk=<|endoftext|> pad=<|padding|> | falcon_mamba gpt_neox mamba mamba2
    mpt olmo olmo2 olmoe rwkv stablelm xlstm
Gemma Siglip2 | bos=<bos> eos=<eos> unk=<unk> pad=<pad> mask=<mask> | diffusion_gemma gemma gemma2 gemma3 gemma3_text
    gemma3n gemma3n_text recurrent_gemma shieldgemma2 siglip2! t5gemma zaya
Herbert | unk=<unk> sep=</s> pad=<pad> cls=<s> mask=<mask> | herbert
Lasr MT5 T5 VideoPrism | eos=</s> unk=<unk> pad=<pad> +=<extra_id_0> | lasr_ctc lasr_encoder longt5 mt5 musicgen
    musicgen_melody pix2struct switch_transformers t5 umt5 videoprism
Llama | bos=<s> eos=</s> unk=<unk> | arcee aria chameleon colpali deepseek_v2 deepseek_v3 deepseek_vl
    deepseek_vl_hybrid diffllama ernie4_5 ernie4_5_moe idefics idefics2 idefics3 jamba janus jetmoe llama llama4
    llama4_text llava llava_next llava_next_video llava_onevision ministral mistral mistral3 mixtral mllama paligemma
    persimmon phi3 phimoe video_llava vipllava zamba zamba2
Luke MLuke | bos=<s> eos=</s> unk=<unk> sep=</s> pad=<pad> cls=<s> mask=<mask> entity_1=<ent> entity_2=<ent2>
    entity_unk=[UNK] entity_pad=[PAD] entity_mask=[MASK] entity_mask2=[MASK2] | luke mluke
MBart | bos=<s> eos=</s> unk=<unk> sep=</s> pad=<pad> cls=<s> mask=<mask> +=ar_AR | mbart
MBart50 | eos=</s> unk=<unk> sep=</s> pad=<pad> cls=<s> mask=<mask> +=ar_AR | mbart50
MPNet | bos=<s> eos=</s> unk=[UNK] sep=</s> pad=<pad> cls=<s> mask=<mask> | mpnet
Nllb | bos=<s> eos=</s> unk=<unk> sep=</s> pad=<pad> cls=<s> mask=<mask> +=ace_Arab | nllb nllb-moe
OpenAIGPT | unk=<unk> | openai-gpt
Pegasus | eos=</s> unk=<unk> pad=<pad> mask=<mask_2> +=<mask_1> | bigbird_pegasus pegasus pegasus_x
Qwen2 Qwen3_5 | eos=<|endoftext|> unk=<|endoftext|> pad=<|endoftext|> | audioflamingo3 colqwen2 cosmos3_omni
    dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr moss_transcribe_diarize ovis2 qianfan_ocr qwen2!
    qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_5! qwen3_5_moe! qwen3_5_moe_text! qwen3_5_text
    qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe qwen4_exp! vibevoice
Reformer | eos=</s> unk=<unk> | reformer
SeamlessM4T | bos=<s> eos=</s> unk=<unk> sep=</s> pad=<pad> cls=<s> | seamless_m4t seamless_m4t_v2
Splinter | unk=[UNK] sep=[SEP] pad=[PAD] cls=[CLS] mask=[MASK] question=[QUESTION] | splinter
Tipsv2 | unk=<unk> pad=<pad> | tipsv2
Udop | eos=</s> unk=<unk> sep=</s> pad=<pad> | udop
XGLM | bos=<s> eos=</s> unk=<unk> sep=</s> pad=<pad> cls=<s> +=<madeupword0> | xglm
"""
"""Classes without their suffixes Tokenizer and TokenizerFast, their defaults by kind, and the model types whose class
is one of them where no file names a class; a mark says that transformers 5 takes it whatever class is named.

Of a long list, such as that of languages, the first token stands for all: what lacks one of them lacks all.
"""


class Default(NamedTuple):
    """A token that a class adds where the files of the model lack the key.

    Attributes:
        key: such as `eos_token`; empty for a token that has none.
        token: its text.
        of: the class, as the tokenizer config spells it, or the model type.
    """

    key: str
    token: str
    of: str


def _rows() -> Iterator[tuple[list[str], list[tuple[str, str]], list[str]]]:
    """Names of classes, (key, token) of their defaults, and model types, of each row."""
    for row in TABLE.replace("\n    ", " ").strip().splitlines():
        names, tokens, types = (part.split() for part in row.split(" | "))
        pairs = [token.split("=", 1) for token in tokens]
        yield names, [("" if kind == "+" else f"{kind}_token", text) for kind, text in pairs], types


CLASSES = {name: tokens for names, tokens, _ in _rows() for name in names}
"""(key, token) of the defaults of a class."""
MODEL_TYPES = {kind.removesuffix("!"): tokens for _, tokens, kinds in _rows() for kind in kinds}
"""(key, token) of the defaults of the class of a model type."""
FORCED = frozenset(kind.removesuffix("!") for _, _, kinds in _rows() for kind in kinds if kind.endswith("!"))
"""Model types whose class transformers 5 takes whatever class is named."""


def class_defaults(tokenizer: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[Default]:
    """The tokens that the class of a tokenizer adds by itself, those of the class that transformers 5 takes first.

    Args:
        tokenizer: the tokenizer config.
        model: the config of the model.
    """
    named, kind = tokenizer.get("tokenizer_class") or model.get("tokenizer_class"), str(model.get("model_type"))
    if kind in FORCED or not named:
        yield from (Default(*pair, f"the tokenizer of a {kind} model") for pair in MODEL_TYPES.get(kind, ()))
    if named:
        name = str(named).removesuffix("Fast").removesuffix("Tokenizer")
        yield from (Default(*pair, f"the class {named}") for pair in CLASSES.get(name, ()))
