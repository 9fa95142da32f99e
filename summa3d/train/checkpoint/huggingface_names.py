"""Tables that map tensors and configuration keys of Transformers folders to those of summa3d checkpoints, by family."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class TensorRule:
    """A summa3d tensor and the Transformers tensors that it is made of.

    `{}` in a name stands for the layer's number, a second one for an expert's.

    Attributes
    ----------
    ours : name of the summa3d tensor
    shape : shape of the summa3d tensor, one key of `huggingface.our_shape` per extent
    theirs : names of the Transformers tensors
    transposed : whether the Transformers tensor is transposed, [out, in], where the summa3d tensor is [in, out]
    heads : the property of ModelConfig that gives the number of heads of the columns. Transformers orders the columns
        [part][head][d], in one tensor of `parts` parts or in `parts` tensors; summa3d orders them [head][part][d], so that a
        block of columns holds whole heads.
    unless : a property of ModelConfig; where it is true, the model has no such tensor
    """

    ours: str
    shape: str
    theirs: tuple[str, ...]
    transposed: bool = False
    heads: str = ""
    parts: int = 1
    unless: str = ""


@dataclass(frozen=True)
class Mapping:
    """A model family: rules for its tensors, and the translation of its configuration.

    Attributes
    ----------
    architecture : the Transformers class whose tensor names the rules use
    base : the prefix that the names of its bare model lack
    once, layer : rules for the tensors that the model has once, and for those of each layer
    keys : summa3d key → Transformers keys, which must agree, and the value that replaces a missing one
    fixed : Transformers key → values that are supported; the first one is written at export
    words : summa3d key → Transformers' words for a value → ours; the first of a value's words is written at export
    copies : tied Transformers tensors that no rule reads → the tensor that they must equal
    ignored : suffixes of names that hold no weights
    renamed : keys of older configurations → their present names
    """

    architecture: str
    base: str
    once: tuple[TensorRule, ...]
    layer: tuple[TensorRule, ...]
    keys: dict[str, tuple[tuple[str, ...], Any]]
    fixed: dict[str, tuple[Any, ...]]
    words: dict[str, dict[str, str]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)


def both(
    ours: str, shape: str, *theirs: str, transposed: bool = False, heads: str = "", parts: int = 1
) -> tuple[TensorRule, TensorRule]:
    """The rules of a weight and of the bias (or β) along its last dim; only the weight may be transposed."""
    weight, bias = (tuple(f"{name}.{kind}" for name in theirs) for kind in ("weight", "bias"))
    return (
        TensorRule(f"{ours}.weight", shape, weight, transposed, heads, parts),
        TensorRule(f"{ours}.bias", shape.split()[-1], bias, False, heads, parts),
    )


# GPT-2 stores linear weights as [in, out], as summa3d does, with q, k and v in one tensor.
GPT2 = Mapping(
    architecture="GPT2LMHeadModel",
    base="transformer.",
    once=(
        TensorRule("embedding.weight", "v h", ("transformer.wte.weight",)),
        TensorRule("positions.weight", "s h", ("transformer.wpe.weight",)),
        *both("norm", "h", "transformer.ln_f"),
    ),
    layer=(
        *both("blocks.{}.attention_norm", "h", "transformer.h.{}.ln_1"),
        *both("blocks.{}.attention.qkv", "h 3h", "transformer.h.{}.attn.c_attn", heads="heads", parts=3),
        *both("blocks.{}.attention.out", "h h", "transformer.h.{}.attn.c_proj"),
        *both("blocks.{}.mlp_norm", "h", "transformer.h.{}.ln_2"),
        *both("blocks.{}.mlp.up", "h f", "transformer.h.{}.mlp.c_fc"),
        *both("blocks.{}.mlp.down", "f h", "transformer.h.{}.mlp.c_proj"),
    ),
    keys={
        "layers": (("n_layer",), 12),
        "hidden": (("n_embd",), 768),
        "heads": (("n_head",), 12),
        "ffn": (("n_inner",), None),
        "sequence": (("n_positions",), 1024),
        "vocabulary": (("vocab_size",), 50257),
        "dropout": (("resid_pdrop", "embd_pdrop"), 0.1),
        "attention_dropout": (("attn_pdrop",), 0.1),
        "norm_eps": (("layer_norm_epsilon",), 1e-5),
        "activation": (("activation_function",), "gelu_new"),
    },
    words={"activation": {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "relu2"}},
    fixed={
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu2"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False, True),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    copies={"lm_head.weight": "transformer.wte.weight"},
    ignored=(".attn.bias", ".attn.masked_bias"),
)

ROPE = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
DECODER = (
    TensorRule("embedding.weight", "v h", ("model.embed_tokens.weight",)),
    TensorRule("norm.weight", "h", ("model.norm.weight",)),
    TensorRule("head.weight", "v h", ("lm_head.weight",), unless="tied"),
)
"""The tensors that a decoder of Llama's kind has once."""
GROUPED = (
    TensorRule("blocks.{}.attention_norm.weight", "h", ("model.layers.{}.input_layernorm.weight",)),
    TensorRule("blocks.{}.attention.q.weight", "h a", ("model.layers.{}.self_attn.q_proj.weight",), transposed=True),
    TensorRule(
        "blocks.{}.attention.kv.weight",
        "h kv",
        ("model.layers.{}.self_attn.k_proj.weight", "model.layers.{}.self_attn.v_proj.weight"),
        transposed=True,
        heads="num_kv_heads",
        parts=2,
    ),
    TensorRule("blocks.{}.attention.out.weight", "a h", ("model.layers.{}.self_attn.o_proj.weight",), transposed=True),
    TensorRule("blocks.{}.mlp_norm.weight", "h", ("model.layers.{}.post_attention_layernorm.weight",)),
)
"""Those of a layer's grouped attention, and of its norms."""
QKV_BIASES = (
    TensorRule("blocks.{}.attention.q.bias", "a", ("model.layers.{}.self_attn.q_proj.bias",), unless="plain_qkv"),
    TensorRule(
        "blocks.{}.attention.kv.bias",
        "kv",
        ("model.layers.{}.self_attn.k_proj.bias", "model.layers.{}.self_attn.v_proj.bias"),
        heads="num_kv_heads",
        parts=2,
        unless="plain_qkv",
    ),
)


def gated(ours: str, width: str, theirs: str) -> tuple[TensorRule, ...]:
    """The rules of a gated feed-forward layer of a width, by the names of both."""
    sizes = {"gate": f"h {width}", "up": f"h {width}", "down": f"{width} h"}
    return tuple(
        TensorRule(
            f"blocks.{{}}.{ours}.{part}.weight", size, (f"model.layers.{{}}.{theirs}.{part}_proj.weight",), transposed=True
        )
        for part, size in sizes.items()
    )


def norms_of_heads(of_q: str, of_k: str) -> tuple[TensorRule, ...]:
    """The rules of the norms of q and k, by their sizes."""
    return (
        TensorRule("blocks.{}.attention.q_norm.weight", of_q, ("model.layers.{}.self_attn.q_norm.weight",)),
        TensorRule("blocks.{}.attention.k_norm.weight", of_k, ("model.layers.{}.self_attn.k_norm.weight",)),
    )


def experts(block: str, gate: str, up: str, down: str) -> tuple[TensorRule, ...]:
    """The rules of a layer's router and experts, by the Transformers names of a layer's experts and of their weights."""
    of = f"model.layers.{{}}.{block}.experts.{{}}"
    return (
        TensorRule("blocks.{}.moe.router.weight", "h e", (f"model.layers.{{}}.{block}.gate.weight",), transposed=True),
        TensorRule("blocks.{}.moe.experts.{}.gate.weight", "h w", (f"{of}.{gate}.weight",), transposed=True),
        TensorRule("blocks.{}.moe.experts.{}.up.weight", "h w", (f"{of}.{up}.weight",), transposed=True),
        TensorRule("blocks.{}.moe.experts.{}.down.weight", "w h", (f"{of}.{down}.weight",), transposed=True),
    )


LLAMA = Mapping(
    architecture="LlamaForCausalLM",
    base="model.",
    once=DECODER,
    layer=(
        *GROUPED,
        *gated("mlp", "f", "mlp"),
    ),
    keys={
        "layers": (("num_hidden_layers",), 32),
        "hidden": (("hidden_size",), 4096),
        "heads": (("num_attention_heads",), 32),
        "kv_heads": (("num_key_value_heads",), None),
        "ffn": (("intermediate_size",), 11008),
        "sequence": (("max_position_embeddings",), 2048),
        "vocabulary": (("vocab_size",), 32000),
        "attention_dropout": (("attention_dropout",), 0.0),
        "norm_eps": (("rms_norm_eps",), 1e-6),
        "rotary_base": (("rope_parameters.rope_theta",), 10000.0),
        "rotary_scaling": (("rope_parameters.rope_type",), "default"),
        "rotary_factor": (("rope_parameters.factor",), None),
        "rotary_low": (("rope_parameters.low_freq_factor",), None),
        "rotary_high": (("rope_parameters.high_freq_factor",), None),
        "rotary_context": (("rope_parameters.original_max_position_embeddings",), None),
        "tied_head": (("tie_word_embeddings",), False),
    },
    fixed={
        "model_type": ("llama",),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "rope_parameters.rope_type": ("default", "linear", "llama3"),
        "rope_parameters.partial_rotary_factor": (None, 1.0),
        "rope_scaling": (None,),
    },
    copies={"lm_head.weight": "model.embed_tokens.weight"},
    ignored=(".rotary_emb.inv_freq",),
    renamed={
        "rope_theta": "rope_parameters.rope_theta",
        "rope_scaling.type": "rope_parameters.rope_type",
        **{f"rope_scaling.{key}": f"rope_parameters.{key}" for key in ROPE},
    },
)

ROTARY_FIXED = {key: LLAMA.fixed[key] for key in LLAMA.fixed if key.startswith("rope_")}
MIXTRAL = replace(
    LLAMA,
    architecture="MixtralForCausalLM",
    layer=(*GROUPED, *experts("block_sparse_moe", "w1", "w3", "w2")),
    keys={
        **LLAMA.keys,
        "kv_heads": (("num_key_value_heads",), 8),
        "ffn": (("intermediate_size",), 14336),
        "sequence": (("max_position_embeddings",), 131072),
        "norm_eps": (("rms_norm_eps",), 1e-5),
        "rotary_base": (("rope_parameters.rope_theta",), 1e6),
        "experts": (("num_local_experts",), 8),
        "experts_per_token": (("num_experts_per_tok",), 2),
        "balance": (("router_aux_loss_coef",), 0.001),
        "head_dim": (("head_dim",), None),
    },
    fixed={
        "model_type": ("mixtral",),
        "hidden_act": ("silu",),
        "sliding_window": (None,),
        "router_jitter_noise": (0.0,),
        **ROTARY_FIXED,
    },
)

QWEN2_MOE = replace(
    LLAMA,
    architecture="Qwen2MoeForCausalLM",
    layer=(
        *GROUPED,
        *QKV_BIASES,
        *gated("mlp", "f", "mlp"),
        *experts("mlp", "gate_proj", "up_proj", "down_proj"),
        *gated("moe.shared", "u", "mlp.shared_expert"),
        TensorRule(
            "blocks.{}.moe.shared_gate.weight", "h 1", ("model.layers.{}.mlp.shared_expert_gate.weight",), transposed=True
        ),
    ),
    keys={
        **LLAMA.keys,
        "kv_heads": (("num_key_value_heads",), 16),
        "ffn": (("intermediate_size",), 5632),
        "sequence": (("max_position_embeddings",), 32768),
        "qkv_bias": (("qkv_bias",), True),
        "experts": (("num_experts",), 60),
        "experts_per_token": (("num_experts_per_tok",), 4),
        "balance": (("router_aux_loss_coef",), 0.001),
        "moe.width": (("moe_intermediate_size",), 1408),
        "moe.shared": (("shared_expert_intermediate_size",), 5632),
        "moe.renormalise": (("norm_topk_prob",), False),
        "moe.dense": (("mlp_only_layers",), None),
    },
    fixed={
        "model_type": ("qwen2_moe",),
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        **ROTARY_FIXED,
    },
)

QWEN3_MOE = replace(
    LLAMA,
    architecture="Qwen3MoeForCausalLM",
    layer=(
        *GROUPED,
        *norms_of_heads("d", "d"),
        *gated("mlp", "f", "mlp"),
        *experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    keys={
        **{key: QWEN2_MOE.keys[key] for key in QWEN2_MOE.keys if key not in ("qkv_bias", "moe.shared")},
        "kv_heads": (("num_key_value_heads",), 4),
        "ffn": (("intermediate_size",), 6144),
        "experts": (("num_experts", "num_local_experts"), 128),
        "experts_per_token": (("num_experts_per_tok",), 8),
        "moe.width": (("moe_intermediate_size",), 768),
        "head_dim": (("head_dim",), None),
    },
    fixed={**QWEN2_MOE.fixed, "model_type": ("qwen3_moe",), "attention_bias": (False,)},
)

OLMOE = replace(
    LLAMA,
    architecture="OlmoeForCausalLM",
    layer=(*GROUPED, *norms_of_heads("a", "kd"), *experts("mlp", "gate_proj", "up_proj", "down_proj")),
    keys={
        **LLAMA.keys,
        "ffn": (("intermediate_size",), 2048),
        "sequence": (("max_position_embeddings",), 4096),
        "norm_eps": (("rms_norm_eps",), 1e-5),
        "clip_qkv": (("clip_qkv",), None),
        "experts": (("num_experts",), 64),
        "experts_per_token": (("num_experts_per_tok",), 8),
        "balance": (("router_aux_loss_coef",), 0.01),
        "moe.renormalise": (("norm_topk_prob",), False),
    },
    fixed={"model_type": ("olmoe",), "hidden_act": ("silu",), "attention_bias": (False,), **ROTARY_FIXED},
)

BERT = Mapping(
    architecture="BertForPreTraining",
    base="bert.",
    once=(
        TensorRule("embedding.weight", "v h", ("bert.embeddings.word_embeddings.weight",)),
        TensorRule("positions.weight", "s h", ("bert.embeddings.position_embeddings.weight",)),
        TensorRule("token_types.weight", "2 h", ("bert.embeddings.token_type_embeddings.weight",)),
        *both("embedding_norm", "h", "bert.embeddings.LayerNorm"),
        *both("pooler", "h h", "bert.pooler.dense", transposed=True),
        *both("relation", "h 2", "cls.seq_relationship", transposed=True),
        *both("transform", "h h", "cls.predictions.transform.dense", transposed=True),
        *both("transform_norm", "h", "cls.predictions.transform.LayerNorm"),
        TensorRule("head_bias", "v", ("cls.predictions.bias",)),
    ),
    layer=(
        *both(
            "blocks.{}.attention.qkv",
            "h 3h",
            *(f"bert.encoder.layer.{{}}.attention.self.{part}" for part in ("query", "key", "value")),
            transposed=True,
            heads="heads",
            parts=3,
        ),
        *both("blocks.{}.attention.out", "h h", "bert.encoder.layer.{}.attention.output.dense", transposed=True),
        *both("blocks.{}.attention_norm", "h", "bert.encoder.layer.{}.attention.output.LayerNorm"),
        *both("blocks.{}.mlp.up", "h f", "bert.encoder.layer.{}.intermediate.dense", transposed=True),
        *both("blocks.{}.mlp.down", "f h", "bert.encoder.layer.{}.output.dense", transposed=True),
        *both("blocks.{}.mlp_norm", "h", "bert.encoder.layer.{}.output.LayerNorm"),
    ),
    keys={
        "layers": (("num_hidden_layers",), 12),
        "hidden": (("hidden_size",), 768),
        "heads": (("num_attention_heads",), 12),
        "ffn": (("intermediate_size",), 3072),
        "sequence": (("max_position_embeddings",), 512),
        "vocabulary": (("vocab_size",), 30522),
        "dropout": (("hidden_dropout_prob",), 0.1),
        "attention_dropout": (("attention_probs_dropout_prob",), 0.1),
        "norm_eps": (("layer_norm_eps",), 1e-12),
    },
    fixed={
        "model_type": ("bert",),
        "hidden_act": ("gelu",),
        "type_vocab_size": (2,),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
        "position_embedding_type": ("absolute",),
    },
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    ignored=("embeddings.position_ids",),
)

FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "bert": BERT, "mixtral": MIXTRAL}
FAMILIES |= {"qwen2_moe": QWEN2_MOE, "qwen3_moe": QWEN3_MOE, "olmoe": OLMOE}
