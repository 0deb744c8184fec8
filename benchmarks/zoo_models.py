"""Small models of other libraries, built from their configs: what `benchmarks.zoo` tries.

The libraries list their architectures themselves. Sizes are made small by the names of the settings; `HINTS` has the
few settings that names do not tell.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

BATCH, LENGTH, IMAGE, HIDDEN, HEADS, LAYERS, VOCABULARY = 8, 16, 32, 64, 4, 2, 256
LIBRARIES = ("transformers", "diffusers", "torchvision", "timm")
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """An architecture: its library, the group of its row, its name, and the class that is built."""

    library: str
    group: str
    name: str
    model: str

    @property
    def key(self) -> str:
        return f"{self.library}:{self.name}"


class WithLoss(nn.Module):
    """A model that returns a scalar: its own loss, else the mean square of its outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        output = self.model(**inputs)
        loss = getattr(output, "loss", None)
        if isinstance(loss, Tensor):
            return loss.mean()
        values = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        return torch.stack([value.square().mean() for value in values]).sum()


class PositionalInputs(nn.Module):
    """A model whose inputs have no names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


# -- sizes, by the names of settings

WIDTHS = (
    "hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|embedding_size|emb_dim|embedding_dim|width|word_embed_proj_dim|"
    r"\w*_hidden_size|\w*_hidden_dim|\w*_embed_dim|lru_width|projection_dim|output_dim|mask_feature_size|"
    "out_hidden_size|pooler_output_size|text_embed_dim|caption_channels|cross_attention_dim|joint_attention_dim|"
    r"pooled_projection_dim|codevector_dim|proj_codevector_dim|classifier_proj_size|xvector_output_dim|inner_dim|"
    r"text_dim|cap_feat_dim|feature_size|linear_key_head_dim_total|hidden_channels|encoder_hid_dim"
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
    (
        r"num_\w*layers|\w*_layers|n_layers?|num_layer|\w*depth|num_blocks|num_hidden_groups",
        lambda size: min(size, LAYERS),
    ),
    (r"\w*experts_per_tok(en)?|moe_topk|moe_k|top_k|num_selected_experts|router_top_k|experts_top_k", 2),
    (r"n_group|topk_group|expert_model_parallel_size", 1),
    (r"\w*num_experts|n_routed_experts|num_local_experts|moe_num_experts", lambda size: min(size, 4)),
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
    "FluxTransformer2DModel": {"axes_dims_rope": (4, 6, 6)},
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


# -- transformers

TASKS = {
    "CAUSAL_LM": "tokens",
    "SEQ_TO_SEQ_CAUSAL_LM": "tokens",
    "MASKED_LM": "tokens",
    "IMAGE_CLASSIFICATION": "class",
    "ZERO_SHOT_IMAGE_CLASSIFICATION": "none",
    "SPEECH_SEQ_2_SEQ": "tokens",
    "CTC": "none",
    "AUDIO_CLASSIFICATION": "class",
    "OBJECT_DETECTION": "none",
    "SEMANTIC_SEGMENTATION": "none",
    "UNIVERSAL_SEGMENTATION": "none",
    "DEPTH_ESTIMATION": "none",
    "VIDEO_CLASSIFICATION": "class",
    "IMAGE_TEXT_TO_TEXT": "tokens",
    "SEQUENCE_CLASSIFICATION": "class",
    "MULTIMODAL_LM": "tokens",
    "BACKBONE": "none",
}
"""The heads of transformers, the first that an architecture has is taken; and the labels that it takes."""


def transformers_entries() -> list[Entry]:
    """Every architecture of transformers that has a model: one entry for each type of config."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found: dict[str, Entry] = {}
    for task in (*TASKS, ""):
        names = getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES")
        for kind, model in names.items():
            model = model if isinstance(model, str) else model[0]
            group = task.replace("_", " ").lower() if task else "base model"
            found.setdefault(kind, Entry("transformers", group, kind, model))
    by_group: dict[str, list[Entry]] = {}
    for entry in found.values():
        by_group.setdefault(entry.group, []).append(entry)
    return in_turn(by_group.values())


def in_turn(groups: Iterable[list[Entry]]) -> list[Entry]:
    """The entries of several lists, spread evenly: a run that is cut short has tried some of each."""
    ranked = [((index + 0.5) / len(group), entry) for group in groups for index, entry in enumerate(group)]
    return [entry for _, entry in sorted(ranked, key=lambda item: item[0])]


def small_config(config: Any) -> Any:
    """A config of transformers, made again with small sizes; its sub-configs too."""
    settings = {name: value for name, value in vars(config).items() if not hasattr(value, "to_dict")}
    parts = {name: small_config(value) for name, value in vars(config).items() if hasattr(value, "to_dict")}
    changed = {**small_settings(settings), **parts, **HINTS.get(config.model_type, {})}
    made = config
    with contextlib.suppress(Exception):  # the constructor of some configs takes other names
        made = type(config)(**changed)
    with contextlib.suppress(Exception):  # a part of a config has settings of its own, such as its backbone
        usual = vars(type(config)())
        own = {name: value for name, value in settings.items() if name in usual and usual[name] != value}
        made = type(config)(**{**own, **changed}) if own else made
    made.allow_global_per_layer_attribute_access = True
    for name, value in changed.items():
        if getattr(made, name, None) != value and not hasattr(value, "to_dict"):
            setattr(made, name, value)
    rotary = getattr(made, "rope_parameters", None)
    axes = getattr(type(made), "ignore_keys_at_rope_validation", ())
    if isinstance(rotary, dict) and "rope_type" in rotary and "mrope_section" in axes:
        head = getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads
        eighth = int(head * rotary.get("partial_rotary_factor", 1.0)) // 8
        made.rope_parameters = {**rotary, "mrope_section": [2 * eighth, eighth, eighth]}
    return made


def transformers_model(entry: Entry) -> tuple[nn.Module, list[Inputs]]:
    """A small model, and inputs to try in turn."""
    library = importlib.import_module("transformers")
    library.logging.set_verbosity_error()
    config = small_config(library.AutoConfig.for_model(entry.name))
    model = getattr(library, entry.model)(config)
    return model, list(transformers_inputs(model, config, TASKS.get(entry.group.upper().replace(" ", "_"), "none")))


def setting(config: Any, names: Iterable[str], default: Any) -> Any:
    """The first of these settings that a config or one of its parts has."""
    for each in (config, *(part for part in vars(config).values() if hasattr(part, "to_dict"))):
        for name in names:
            if isinstance(found := getattr(each, name, None), (int, list, tuple)):
                return found
    return default


def transformers_inputs(model: Any, config: Any, labels: str) -> Iterator[Inputs]:
    """Batches by the names of the model's arguments: with labels first, text and image before either alone."""
    names = set(inspect.signature(model.forward).parameters)
    vocabulary = setting(config.get_text_config(), ["vocab_size"], VOCABULARY)
    tokens = torch.randint(3, max(4, min(vocabulary, 100)), (BATCH, LENGTH))
    channels = setting(config, ["num_channels", "in_channels", "in_chans"], 3)
    channels = channels if isinstance(channels, int) else 3
    size = setting(config, ["image_size", "sample_size", "img_size"], IMAGE)
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    mels = setting(config, ["num_mel_bins", "input_feat_per_channel", "feature_size"], 80)
    positions = setting(config, ["max_source_positions"], LENGTH)
    made = {
        "input_ids": tokens,
        "pixel_values": torch.randn(BATCH, channels, height, width),
        "pixel_values_videos": torch.randn(BATCH, setting(config, ["num_frames"], 4), channels, height, width),
        "input_values": torch.randn(BATCH, 2000),
        "input_features": torch.randn(BATCH, mels, 2 * positions),
        "past_values": torch.randn(BATCH, setting(config, ["context_length"], 32), 1),
        "inputs_embeds": torch.randn(BATCH, LENGTH, setting(config, ["hidden_size"], HIDDEN)),
        "states": torch.randn(BATCH, LENGTH, setting(config, ["state_dim"], 17)),
    }
    # What some models need beside one of these.
    context, future = made["past_values"].shape[1], setting(config, ["prediction_length"], 8)
    past, features = context + max(setting(config, ["lags_sequence"], [0])), setting(config, ["num_time_features"], 0)
    beside = {
        "query_embeds": made["inputs_embeds"],
        "bbox": torch.randint(0, 16, (BATCH, LENGTH, 4)).sort(-1).values,
        "actions": torch.randn(BATCH, LENGTH, setting(config, ["act_dim"], 4)),
        "rewards": torch.randn(BATCH, LENGTH, 1),
        "returns_to_go": torch.randn(BATCH, LENGTH, 1),
        "timesteps": torch.arange(LENGTH).repeat(BATCH, 1),
        "past_time_features": torch.randn(BATCH, past, features),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": torch.randn(BATCH, future),
        "future_time_features": torch.randn(BATCH, future, features),
    }
    beside = {name: value for name, value in beside.items() if name in names}
    if "past_time_features" in names:
        made["past_values"] = torch.randn(BATCH, past)
    main = model.main_input_name
    kinds: list[str] = [name for name in ("input_ids", "pixel_values") if name in names]
    tried: list[list[str]] = [kinds] if len(kinds) == 2 else []
    tried += [["input_ids", name] for name in ("input_features", "input_values") if {"input_ids", name} <= names]
    tried += [[main]] if main in made else []
    tried += [[name] for name in made if name in names and name != main]
    targets = {"tokens": tokens, "class": torch.randint(0, 2, (BATCH,))}
    for chosen in tried:
        batch = {name: made[name] for name in chosen} | beside
        if "input_ids" in batch and "attention_mask" in names:
            batch["attention_mask"] = torch.ones_like(tokens)
        if "input_features" in batch and "input_features_mask" in names:
            batch["input_features_mask"] = torch.ones(BATCH, 2 * positions, dtype=torch.bool)
        # Some features have time first, some waves a channel, some images are videos.
        others = []
        if "input_features" in batch:
            others.append({"input_features": made["input_features"].transpose(1, 2).contiguous()})
        if "input_values" in batch:
            others.append({"input_values": made["input_values"][:, None]})
        if "pixel_values" in batch:
            frames = setting(config, ["num_frames"], 4)
            others.append({"pixel_values": torch.randn(BATCH, frames, channels, height, width)})
        for other in ({}, *others):
            if labels != "none" and "labels" in names:
                yield {**batch, **other, "labels": targets[labels]}
            if "decoder_input_ids" in names:
                yield {**batch, **other, "decoder_input_ids": tokens}
            yield {**batch, **other}


# -- diffusers


def diffusers_entries() -> list[Entry]:
    """Every model class of diffusers."""
    library = importlib.import_module("diffusers")
    structure = library._import_structure["models"]
    grouped: dict[str, list[Entry]] = {}
    for name in structure:
        group = "transformer" if "Trans" in name else "unet"
        if name.startswith(("Auto", "VQ", "Consistency")):
            group = "autoencoder"
        if re.search("Model$|DiT$|VAE$|Autoencoder|^VQ", name) and name not in ("ModelMixin", "AutoModel"):
            grouped.setdefault(group, []).append(Entry("diffusers", group, name, name))
    return in_turn(grouped.values())


def diffusers_model(entry: Entry) -> tuple[nn.Module, list[Inputs]]:
    """A small model, and inputs to try in turn."""
    kind = getattr(importlib.import_module("diffusers"), entry.model)
    parameters = inspect.signature(kind.__init__).parameters.values()
    settings = {each.name: each.default for each in parameters if each.default is not each.empty}
    model = kind(**{**small_settings(settings), **HINTS.get(entry.name, {})})
    return model, list(diffusers_inputs(model))


TEXT_WIDTHS = (
    "joint_attention_dim", "cross_attention_dim", "caption_channels", "text_dim", "text_embed_dim", "cap_feat_dim",
    "caption_projection_dim",
)  # fmt: skip
"""Settings that have the size of a text's features."""


def diffusers_inputs(model: Any) -> Iterator[Inputs]:
    """Batches by the names of the model's arguments: images, then sequences, then videos."""
    config, arguments = model.config, inspect.signature(model.forward).parameters
    channels = config.get("in_channels", 3)
    joint = next((config[name] for name in TEXT_WIDTHS if isinstance(config.get(name), int)), HIDDEN)
    size = config.get("sample_size") or IMAGE
    size = size if isinstance(size, int) else IMAGE
    sides = [(size, size), (4, size // 2, size // 2), ()]
    known: Inputs = {
        "timestep": torch.full((BATCH,), 10),
        "encoder_hidden_states": torch.randn(BATCH, LENGTH, joint),
        "pooled_projections": torch.randn(BATCH, config.get("pooled_projection_dim") or HIDDEN),
        "class_labels": torch.zeros(BATCH, dtype=torch.long),
        "img_ids": torch.zeros(LENGTH, 3),
        "txt_ids": torch.zeros(LENGTH, 3),
        "guidance": torch.ones(BATCH),
        "encoder_attention_mask": torch.ones(BATCH, LENGTH),
        "prompt_embeds": torch.randn(BATCH, LENGTH, joint),
    }
    main = next(iter(arguments))
    for side in sides:
        sample = torch.randn(BATCH, channels, *side) if side else torch.randn(BATCH, LENGTH, channels)
        needed = {each.name for each in arguments.values() if each.default is each.empty}
        for wanted in (needed, set(known) - {"class_labels"}, set(known)):
            others = {name: value for name, value in known.items() if name in wanted and name in arguments}
            yield {main: sample, **others}


# -- torchvision and timm


def vision_entries(library: str) -> list[Entry]:
    """One architecture of each family: of torchvision the smallest, of timm the first that is called small."""
    names = importlib.import_module(library + (".models" if library == "torchvision" else "")).list_models()
    grouped: dict[str, list[str]] = {}
    if library == "timm":
        registry = importlib.import_module("timm.models")
        for name in names:
            grouped.setdefault(registry.model_entrypoint(name).__module__.rpartition(".")[2], []).append(name)
    else:
        for name in names:
            grouped.setdefault(re.split(r"[_\d]", name)[0], []).append(name)
    small = re.compile("test_|atto|femto|pico|nano|xxs|tiny|xs|small|mini|_s")
    chosen = [min(each, key=lambda name: (not small.search(name), len(name), name)) for each in grouped.values()]
    return [Entry(library, "images", name, name) for name in chosen]


def vision_model(entry: Entry) -> tuple[nn.Module, list[Inputs]]:
    """A model of a vision library as it is, and an image batch of its size."""
    if entry.library == "timm":
        model = importlib.import_module("timm").create_model(entry.model, num_classes=16)
        sizes = [(model.default_cfg.get("input_size") or (3, 224, 224))[1]]
        sizes = [64, *sizes] if sizes[0] > 64 else sizes
    else:
        model, sizes = importlib.import_module("torchvision.models").get_model(entry.model, weights=None), [64, 224]
    return PositionalInputs(model), [{"x": torch.randn(BATCH, 3, size, size)} for size in sizes]


# -- all of them


def entries(library: str) -> list[Entry]:
    """The architectures of a library; none where it is not installed."""
    if importlib.util.find_spec(library) is None:
        return []
    if library == "transformers":
        return transformers_entries()
    return diffusers_entries() if library == "diffusers" else vision_entries(library)


def build(entry: Entry) -> tuple[nn.Module, list[Inputs]]:
    """A small model of an architecture in float32, and inputs to try in turn."""
    torch.manual_seed(0)
    makers = {"transformers": transformers_model, "diffusers": diffusers_model}
    model, inputs = makers.get(entry.library, vision_model)(entry)
    without_dropout(model)
    return model, inputs


def without_dropout(model: nn.Module) -> None:
    """Set every rate of dropout to zero: on several devices, other numbers are drawn than on one."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and re.search(r"drop(out|_?path|_?prob|_?rate|layer)?", name):
                setattr(module, name, 0.0)
