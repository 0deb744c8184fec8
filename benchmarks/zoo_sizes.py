"""Small sizes for the settings of a model's config, found by their names; what `benchmarks.zoo_models` builds with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

BATCH, LENGTH, IMAGE, HIDDEN, HEADS, LAYERS, VOCABULARY = 8, 16, 32, 64, 4, 2, 256

WIDTHS = (
    "hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|embedding_size|emb_dim|embedding_dim|width|word_embed_proj_dim|"
    r"\w*_hidden_size|\w*_hidden_dim|\w*_embed_dim|lru_width|projection_dim|output_dim|mask_feature_size|"
    "out_hidden_size|pooler_output_size|text_embed_dim|caption_channels|cross_attention_dim|joint_attention_dim|"
    r"pooled_projection_dim|codevector_dim|proj_codevector_dim|classifier_proj_size|xvector_output_dim|inner_dim|"
    r"text_dim|cap_feat_dim|feature_size|linear_key_head_dim_total|hidden_channels|encoder_hid_dim|model_dim|"
    r"text_in_dim|in_text_dim\w*|text_emb_dim|text_hidden_dim|llm_features_dim|\w*cross_attention_dim\w*|text_embed_2_dim|"
    r"caption_projection_dim|model_channels|img_context_dim_out|crossattn_proj_in_channels|encoder_hidden_states_channels|"
    r"image_proj_dim|context_in_dim|cond_token_dim|global_cond_dim|cross_attention_input_dim|time_dim|base_channels|base_dim|"
    r"decoder_base_dim|text_encoder_dim|adaln_dim|image_dim|motion_\w+dim|motion_encoder_size|global_states_input_dim"
)
INNER = r"\w*intermediate_size|\w*ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|dim_feedforward|ff_dim"
SIZES: tuple[tuple[str, int | Callable[[int], int]], ...] = (
    (r"\w*vocab_size\w*|vocab_size_\w*", VOCABULARY),
    (r"\w*(key_value|kv|linear_num_key|num_key)_heads?|n_kv_heads?|multi_query_group_num", 2),
    (r"qk_rope_head_dim|rotary_dim|index_head_dim", 8),
    ("qk_head_dim", 24),
    (r"\w*head_dim|d_kv|dim_head|attention_key_dim|kv_channels", 16),
    (r"\w*_heads?|n_heads?|num_heads|\w*attention_heads", lambda size: min(size, HEADS)),
    ("num_feat_extract_layers", lambda size: size),
    (r"num_kv_shared_layers|num_nextn_predict_layers|mtp_num_hidden_layers", 0),
    ("first_k_dense_replace|moe_layer_start_index|decoder_sparse_step|moe_layer_freq|moe_every_n_layers", 1),
    (r"layers_per_\w*block|\w*layers_per_block|num_res_blocks|num_(enc|dec|text)_blocks", 1),
    ("num_visual_blocks", LAYERS),
    ("sample_height|sample_width", IMAGE // 2),
    ("sample_frames", 33),
    (r"max_text_seq_length|text_len\w*", LENGTH),
    ("ch|channels|encoder_dim|decoder_dim|decoder_channels|encoder_channels", lambda size: min(size, HIDDEN // 2)),
    (
        r"num_\w*layers|\w*_layers|n_layers?|num_layer|\w*depth|num_blocks|num_hidden_groups",
        lambda size: min(size, LAYERS),
    ),
    (r"\w*experts_per_tok(en)?|moe_topk|moe_k|top_k|num_selected_experts|router_top_k|experts_top_k", 2),
    (r"n_group|topk_group|expert_model_parallel_size", 1),
    (r"\w*num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num", lambda size: min(size, 4)),
    (r"q_lora_rank|kv_lora_rank|\w*_lora_rank|\w*_low_rank_dim|time_step_rank", lambda size: min(size, 16)),
    ("image_size|sample_size|crop_size|pretrain_image_size|img_size|input_image_size", IMAGE),
    ("patch_size", lambda size: min(size, 8)),
    (
        r"max_position_embeddings|n_positions|max_seq_len\w*|max_sequence_length|max_target_positions|n_ctx|seq_length|"
        "max_source_positions|max_position|context_length|model_max_length",
        lambda size: min(size, 128),
    ),
    (
        "sliding_window|attention_window|local_attention|window_size|index_topk|attention_chunk_size",
        lambda size: min(size, 8),
    ),
    ("attention_hidden_size", 2 * HIDDEN),  # of both streams
    (WIDTHS, lambda size: min(size, HIDDEN)),
    (INNER, lambda size: min(size, 2 * HIDDEN)),
    ("num_queries", lambda size: min(size, 16)),
    ("num_groups", lambda size: min(size, 8)),
    ("upsample_groups", HIDDEN),
    ("num_labels", 4),
)
DEPTHS = re.compile(r"(encoder_)?depths?|num_blocks|\w*_layers|layers_per_block|blocks_per_stage|stage_num\w*")
HEAD_LISTS = re.compile(r"\w*_heads?\w*|heads|attention_head_dim")
WIDTH_LISTS = re.compile(r"\w*hidden_sizes|embed_dims?|dims|\w*_channels|encoder_channel_dim|embed_dim_per_stage")
AXES = r"^(axes_dims?(_rope)?|rope_axes_dim|rope_dim_list)$"
"""Sizes that the axes of a rotary embedding have in a head."""
AXES_OF_A_HEAD = {2: (8, 8), 3: (4, 6, 6), 4: (4, 4, 4, 4)}
TOKEN = re.compile(r"\w*_token_(id|index)|\w*token_id|\w*token_index|bos_id|eos_id|\w*_token_idx")

HINTS: dict[str, dict[str, Any]] = {
    "longformer": {"attention_window": [8, 8]},
    "led": {"attention_window": [8, 8]},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "reformer": {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [32, 32], "attn_layers": ["local", "local"]},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "mamba2": {"num_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "efficientnet": {"hidden_dim": 2560},
    "whisper": {"max_source_positions": 16, "num_mel_bins": 16},
    "nemotron3_diarization_audio": {"num_key_value_heads": HEADS},  # its values are of every head
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": HEADS},
    "nemotron3_5_transcribe_word_timestamp": {"num_key_value_heads": HEADS},
    "AutoencoderKL": {"norm_num_groups": 8},
    "UNet2DModel": {"norm_num_groups": 8},
    "UNet2DConditionModel": {"norm_num_groups": 8},
    "HunyuanDiT2DModel": {"in_channels": 4, "patch_size": 2, "learn_sigma": False},
    "LatteTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, "caption_channels": HIDDEN, "patch_size": 2, "video_length": 4,
    },
    "DreamLiteTransformer2DModel": {"in_channels": HIDDEN, "norm_num_groups": 8},
    "Transformer2DModel": {"in_channels": HIDDEN, "norm_num_groups": 8},
    "TransformerTemporalModel": {"in_channels": HIDDEN, "norm_num_groups": 8},
    "HunyuanDiT2DControlNetModel": {"in_channels": 4, "patch_size": 2},
    "EasyAnimateTransformer3DModel": {"in_channels": 4, "out_channels": 4, "patch_size": 2},
    "PRXTransformer2DModel": {"axes_dim": [8, 8]},
    "UNet1DModel": {"extra_in_channels": HIDDEN},
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3, "out_channels": 3, "latent_channels": 8, "block_out_channels": (32, 64),
        "layers_per_block": 1, "spatial_compression_ratio": 2, "sample_size": IMAGE // 2,
    },
}
"""Settings of an architecture or a part of one, by its name in the library, that cannot be found by their own names."""


def small_number(name: str, size: int) -> int:
    """The small value of a setting.

    >>> small_number("num_hidden_layers", 32), small_number("vocab_size", 50257), small_number("num_channels", 3)
    (2, 256, 3)
    """
    for pattern, small in SIZES:
        if re.fullmatch(pattern, name):
            return min(size, small) if isinstance(small, int) else small(size)
    return size


def small_numbers(name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The small values of a setting with one number a stage: the ratio of widths and heads is kept.

    >>> small_numbers("depths", (3, 4, 6, 3)), small_numbers("hidden_sizes", (96, 192, 384))
    ((1, 1, 1, 1), (32, 64, 128))
    """
    if not sizes or min(sizes) <= 0:
        return sizes
    if re.fullmatch(AXES, name):
        return AXES_OF_A_HEAD.get(len(sizes), sizes)
    if DEPTHS.fullmatch(name):
        return tuple(min(size, 1) for size in sizes)
    if HEAD_LISTS.fullmatch(name):
        return tuple(max(1, size // min(sizes)) for size in sizes)
    if WIDTH_LISTS.fullmatch(name) and min(sizes) > 32:
        return tuple(size * 32 // min(sizes) for size in sizes)
    return sizes


def small_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config that change when it is made small.

    Lists with one item a layer are cut to the first layer of each kind.
    """
    changed: dict[str, Any] = {}
    # 1. Numbers and lists of numbers.
    for name, value in settings.items():
        if isinstance(value, bool) or name.startswith("_"):
            continue
        if isinstance(value, int):
            changed[name] = small_number(name, value)
        elif isinstance(value, float) and re.search("drop|mask_.*prob", name):
            changed[name] = 0.0
        elif isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
            changed[name] = type(value)(small_numbers(name, tuple(value)))
            if re.search("indices$|indexes$", name):  # of layers
                changed[name] = list(range(len(value)))
        elif isinstance(value, dict):
            changed[name] = small_mapping(value)
    if "apply_spec_augment" in settings:
        changed["apply_spec_augment"] = False
    if "kv_lora_rank" in settings and "num_key_value_heads" in changed:  # its keys and values are of every head
        changed["num_key_value_heads"] = changed.get("num_attention_heads", HEADS)
    if "qk_rope_head_dim" in changed and "head_dim" in changed:  # the size that is rotated
        changed["head_dim"] = changed["qk_rope_head_dim"]
    given = {
        "head_dim": HIDDEN // HEADS,
        "prediction_length": 8,
        "default_language": "en_XX",
        "vocab_size": VOCABULARY,
        "num_experts_per_tok": 2,
    }
    if "kv_lora_rank" in settings:
        del given["head_dim"]
    changed |= {name: value for name, value in given.items() if settings.get(name, value) is None}
    # 2. Lists with one item a layer.
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        layers = settings.get(name)
        if not isinstance(layers, int):
            continue
        lists = {key: each for key, each in settings.items() if isinstance(each, (list, tuple)) and len(each) == layers}
        rows = list(zip(*lists.values())) if lists and layers > LAYERS else []
        kept = sorted({str(row): index for index, row in reversed(list(enumerate(rows)))}.values())[:4]
        if len(kept) == 1:
            kept = [kept[0], kept[0] + 1]
        if kept:
            changed[name] = len(kept)
            changed |= {key: [changed.get(key, value)[index] for index in kept] for key, value in lists.items()}
        taken = [len(changed[key]) for key in settings if re.search("indices$|indexes$", key) and key in changed]
        changed[name] = max(changed.get(name, layers), *taken, 0)
    # 3. Special tokens lie in the vocabulary, each by itself.
    free = VOCABULARY - 1
    for name, value in settings.items():
        if not TOKEN.fullmatch(name):
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value >= VOCABULARY // 2:
            changed[name] = free
            free -= 1
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
            changed[name] = [min(each, 2) for each in value][:1]
    return {name: value for name, value in changed.items() if value != settings[name]}


def small_mapping(value: dict[str, Any]) -> dict[str, Any]:
    """Settings of rotary embeddings: the sections of several axes are those of the small head."""
    return {
        key: [4, 2, 2] if key == "mrope_section" else small_mapping(each) if isinstance(each, dict) else each
        for key, each in value.items()
    }
