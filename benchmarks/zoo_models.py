"""Small models of other libraries, built from their configs: what `benchmarks.zoo` tries.

The libraries list their architectures themselves. Sizes are made small by the names of the settings; `HINTS` has the
few settings that names do not tell.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import re
import unittest.mock
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.zoo_sizes import AXES, BATCH, HIDDEN, HINTS, IMAGE, LENGTH, VOCABULARY, small_settings

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

    def forward(self, **inputs: Any) -> Any:
        return self.inner(*inputs.values())


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
            getattr(library, name)  # imported here, once, not in the process of each
            grouped.setdefault(group, []).append(Entry("diffusers", group, name, name))
    return in_turn(grouped.values())


def diffusers_model(entry: Entry) -> tuple[nn.Module, list[Inputs]]:
    """A small model, and inputs to try in turn."""
    kind = getattr(importlib.import_module("diffusers"), entry.model)
    parameters = inspect.signature(kind.__init__).parameters.values()
    settings = {each.name: each.default for each in parameters if each.default is not each.empty}
    changed = {**small_settings(settings), **HINTS.get(entry.name, {})}
    if isinstance(settings.get("sample_size"), int):
        changed["sample_size"] = IMAGE // 2
    model = kind(**changed)
    return model, list(diffusers_inputs(model))


TEXT_WIDTHS = (
    "joint_attention_dim", "caption_channels", "cross_attention_dim", "text_dim", "text_embed_dim", "cap_feat_dim",
    "text_in_dim", "in_text_dim", "context_in_dim", "cond_token_dim", "text_hidden_dim", "encoder_hidden_size",
    "cross_attention_input_dim", "condition_dim",
)  # fmt: skip
"""Settings that have the size of a text's features."""


def diffusers_inputs(model: Any) -> Iterator[Inputs]:
    """Batches by the names of the model's arguments: images, then videos, sequences, and sequences with channels first.

    For each, the arguments that have no default come first, then more of those that are known.
    """
    # 1. Sizes.
    config, arguments = model.config, inspect.signature(model.forward).parameters

    def width(*names: str) -> int:
        return next((config[name] for name in names if isinstance(config.get(name), int)), HIDDEN)

    names = ("in_channels", "in_visual_dim", "in_dim", "io_channels", "audio_channels", "num_channels", "mel_bins")
    channels = next((config[name] for name in names if config.get(name)), 3)
    joint, size = width(*TEXT_WIDTHS), config.get("sample_size") or IMAGE // 2
    size = size if isinstance(size, int) else IMAGE // 2
    rotary = next((config[name] for name in config if re.search(AXES, name) and config[name]), (1, 1, 1))
    axes = len(rotary) if isinstance(rotary, (list, tuple)) else 3
    # 2. Arguments beside the sample.
    text, mask = torch.randn(BATCH, LENGTH, joint), torch.ones(BATCH, LENGTH, dtype=torch.long)
    pooled = torch.randn(BATCH, width("pooled_projection_dim", "in_text_dim2", "global_cond_dim"))
    audio = torch.randn(BATCH, LENGTH, width("audio_in_channels", "in_audio_dim"))
    known: Inputs = {
        **dict.fromkeys(("timestep", "t", "r_timestep", "timestep_r", "timesteps"), torch.full((BATCH,), 10.0)),
        **dict.fromkeys(("encoder_hidden_states", "prompt_embeds", "cap_feats", "text_bth"), text),
        **dict.fromkeys(("encoder_attention_mask", "encoder_mask", "encoder_hidden_states_mask"), mask),
        **dict.fromkeys(("pooled_projections", "pooled_embeds", "global_hidden_states"), pooled),
        **dict.fromkeys(("img_ids", "txt_ids"), torch.zeros(LENGTH, axes)),
        **dict.fromkeys(("original_size", "target_size"), torch.full((BATCH, 2), float(size))),
        "crop_coords": torch.zeros(BATCH, 2),
        "text_lens": torch.full((BATCH,), LENGTH),
        "padding_mask": torch.zeros(1, 1, size, size),
        "class_labels": torch.zeros(BATCH, dtype=torch.long),
        "guidance": torch.ones(BATCH),
        "audio_hidden_states": audio,
        "audio_encoder_hidden_states": text,
        "audio_num_frames": LENGTH,
        **dict.fromkeys(("height", "width"), 4),
        "num_frames": 1,
        "fps": 16,
        "encoder_hidden_states_2": torch.randn(BATCH, LENGTH, width("text_embed_2_dim")),
        "encoder_attention_mask_2": mask,
        "encoder_hidden_states_t5": torch.randn(BATCH, LENGTH, width("cross_attention_dim_t5", "text_embed_dim_t5")),
        **dict.fromkeys(("text_embedding_mask", "text_embedding_mask_t5"), mask),
        "image_embeds": torch.randn(BATCH, LENGTH, width("image_embed_dim", "image_proj_dim")),
        "img_shapes": [[(1, 4, 4)]] * BATCH,
        "image_meta_size": torch.full((BATCH, 6), float(size)),
        "style": torch.zeros(BATCH, dtype=torch.long),
        "prior_token_id": torch.zeros(BATCH, size * size // 4, dtype=torch.long),
        "prior_token_drop": torch.zeros(BATCH, size * size // 4, dtype=torch.bool),
        "visual_rope_pos": [torch.arange(4), torch.arange(size // 2), torch.arange(size // 2)],
        "text_rope_pos": torch.arange(LENGTH),
        "position_ids": torch.zeros(BATCH, LENGTH, axes, dtype=torch.long),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    # 3. The sample, of several kinds.
    main = next(iter(arguments))
    frames = 2 * width("temporal_compression_ratio", "patch_size_t") + 1
    sides = [(channels, size, size), (channels, frames if frames < 20 else 5, size, size), (LENGTH, channels)]
    sides += [(channels, 4, size, size), (frames if frames < 20 else 5, channels, size, size), (channels, 32 * LENGTH)]
    sides += [(4, size, size, channels), (channels, 4 * size, 4 * size), (channels, 9, 4 * size, 4 * size)]
    needed = {each.name for each in arguments.values() if each.default is each.empty}
    for side in sides:
        sample = torch.randn(BATCH, *side)
        beside = {**known, "controlnet_cond": sample, "context_latents": sample}
        scaled = torch.randn(BATCH, width("conditioning_channels", "channels") or 3, 8 * size, 8 * size)
        for condition in (sample, scaled):
            beside["controlnet_cond"] = condition
            for left in (set(known), {"class_labels", "added_cond_kwargs"}, {"class_labels", "guidance"}, set()):
                wanted = set(known) - left | needed
                others = {name: value for name, value in beside.items() if name in wanted and name in arguments}
                yield {main: sample, **{name: value for name, value in others.items() if name != main}}
            if "controlnet_cond" not in arguments:
                break


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
            grouped.setdefault(re.findall(r"[a-z]+(?:_v\d)?", name)[0], []).append(name)
    small = re.compile("test_|atto|femto|pico|nano|xxs|tiny|xs|small|mini|_[st]$|_[st]_")
    chosen = [min(each, key=lambda name: (not small.search(name), len(name), name)) for each in grouped.values()]
    return [Entry(library, "images", name, name) for name in chosen]


def vision_model(entry: Entry) -> tuple[nn.Module, list[Inputs]]:
    """A small model of a vision library, and an image batch that it takes.

    The library's function is called once, without memory, to learn the settings of its class. Fewer layers and smaller
    widths are tried, then fewer layers alone, then the model as it is; each with the smallest images that it takes.
    """
    # 1. Learn the class and its settings.
    given: dict[str, Any] = {"num_classes": 16}
    if entry.library == "timm":
        function = importlib.import_module("timm").create_model
    else:
        models = importlib.import_module("torchvision.models")
        function = models.get_model
        given["weights"] = None
        if "weights_backbone" in inspect.signature(models.get_model_builder(entry.model)).parameters:
            given["weights_backbone"] = None
    with torch.device("meta"):
        kind: Any = type(function(entry.model, **given))
        calls = recorded_calls(kind, lambda: function(entry.model, **given))
    # 2. Try small ones.
    makers: list[tuple[Callable[[], nn.Module], int | None]] = []
    if calls and not any(isinstance(each, nn.Module) for each in calls[-1].values()):
        depths, sizes = shallow(calls[-1]), small_settings(calls[-1])
        names = [name for name in ("img_size", "image_size", "input_size") if isinstance(calls[-1].get(name), int)]
        for changed in ({**sizes, **depths, **dict.fromkeys(names, 2 * IMAGE)}, depths):
            settings = {**calls[-1], **changed}
            makers.append((functools.partial(kind, **settings), next((settings[name] for name in names), None)))
    whole: Callable[[], nn.Module] = functools.partial(function, entry.model, **given)
    for make, size in (*makers, (whole, None)):
        with contextlib.suppress(Exception):  # whatever a library raises of sizes that do not suit it
            model = PositionalInputs(made := make())
            usual = (getattr(made, "default_cfg", None) or {}).get("input_size", (3, 299, 299))[-1]
            for inputs in vision_inputs(size, usual):
                with contextlib.suppress(Exception), torch.no_grad():
                    model(**inputs)
                    return model, [inputs]
    return PositionalInputs(whole()), vision_inputs(None, 299)


def vision_inputs(size: int | None, usual: int) -> list[Inputs]:
    """Images, videos, pairs of images, and images with boxes; images of this size if it is given."""
    sizes = [size] if size else [IMAGE, 2 * IMAGE, 128, 224, usual]
    images = [{"x": torch.randn(BATCH, 3, size, size)} for size in sizes]
    videos = [{"x": torch.randn(BATCH, 3, frames, size, size)} for frames, size in ((4, IMAGE), (16, 112), (16, 224))]
    boxes = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    boxes |= {"masks": torch.ones(1, 64, 64, dtype=torch.uint8), "keypoints": torch.ones(1, 17, 3)}
    found = {"x": [torch.rand(3, 64, 64) for _ in range(2)], "targets": [boxes] * 2}
    pair = {"x": torch.randn(2, 3, 128, 128), "y": torch.randn(2, 3, 128, 128)}
    return [*images, *videos, pair, found]


def recorded_calls(kind: type, make: Callable[[], object]) -> list[dict[str, Any]]:
    """The arguments of each call of a class's constructor while `make` runs, by their names."""
    owner: Any = kind
    constructor, calls = owner.__init__, list[dict[str, Any]]()
    signature = inspect.signature(constructor)

    @functools.wraps(constructor)
    def recording(self: Any, *values: Any, **named: Any) -> None:
        bound = signature.bind(self, *values, **named)
        bound.apply_defaults()
        found = dict(list(bound.arguments.items())[1:])
        extra = [name for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD]
        for name in extra:
            found |= found.pop(name, {})
        calls.append(found)
        constructor(self, *values, **named)

    with unittest.mock.patch.object(kind, "__init__", recording):
        make()
    return calls


def shallow(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that change when each stage has one layer, and a model without stages two."""
    return {name: made for name, value in settings.items() if (made := shallow_value(name, value)) is not value}


def shallow_value(name: str, value: Any) -> Any:
    """One setting, or an item of a list or of a description of a stage, with few layers.

    >>> shallow_value("depths", (3, 4, 6, 3)), shallow_value("blocks", [[{"k": 3}, {"k": 5}], [{"k": 3}]])
    ((1, 1, 1, 1), [[{'k': 3}], [{'k': 3}]])
    """
    numbers = re.fullmatch(r"\w*depths?|\w*layers|layers?_\w+|block_config|num_blocks|d|blocks|stage_num\w*", name)
    if isinstance(value, int) and not isinstance(value, bool):
        return min(value, 2 if name in ("depth", "num_layers") else 1) if numbers else value
    if isinstance(value, (list, tuple)) and value and type(value) in (list, tuple):
        if all(isinstance(each, int) for each in value):
            return type(value)(min(each, 1) for each in value) if numbers else value
        if all(isinstance(each, list) and each and isinstance(each[0], dict) for each in value):
            return [each[:1] for each in value]
        made = type(value)(shallow_value("", each) for each in value)
        return made if any(new is not old for new, old in zip(made, value, strict=True)) else value
    if isinstance(value, dict):
        changed = shallow(value)
        return {**value, **changed} if changed else value
    if hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module, Tensor)) and not callable(value):
        changed = shallow(vars(value))
        if changed:
            value = copy.copy(value)
            for field, each in changed.items():
                object.__setattr__(value, field, each)
    return value


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
