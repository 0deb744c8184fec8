"""Capture takes the models of `transformers` and `diffusers` as they are, and leaves them so."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import shardweave as sw
from shardweave.compiler.capture import capture
from shardweave.ir.errors import CaptureError
from tests.compiler.test_capture import assert_computes


def ids(*size: int) -> Tensor:
    return torch.randint(3, 60, size or (2, 6))


AUDIO = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "conv_dim": (8,),
    "conv_stride": (5,),
    "conv_kernel": (10,),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
}
T5 = {
    "vocab_size": 64,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "use_cache": False,
    "dropout_rate": 0.0,
}
VIT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """Warns of its loss type, once."""
    config = tf.GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2, use_cache=False)
    config.loss_type = "of no known kind"
    return tf.GPT2LMHeadModel(config), {"input_ids": ids(), "labels": ids()}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    """An encoder and a decoder, with a bias by relative position."""
    model = tf.T5ForConditionalGeneration(tf.T5Config(**T5, decoder_start_token_id=0, pad_token_id=0))
    return model, {"input_ids": ids(), "labels": ids(2, 5)}


def t5_inputs() -> tuple[nn.Module, dict[str, Any]]:
    """Without labels, the decoder's inputs given."""
    return t5()[0], {"input_ids": ids(), "decoder_input_ids": ids(2, 5)}


def segformer() -> tuple[nn.Module, dict[str, Any]]:
    """Collects its own hidden states by hooks."""
    config = tf.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        drop_path_rate=0.0,
    )
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 2, (2, 32, 32))}
    return tf.SegformerForSemanticSegmentation(config), inputs


def nested() -> tuple[nn.Module, dict[str, Any]]:
    """Collects hidden states in itself, and again in the two models that it holds."""
    model, inputs = t5()
    return model, {**inputs, "output_hidden_states": True}


def wav2vec2() -> tuple[nn.Module, dict[str, Any]]:
    """Asks for the gradient of its input."""
    config = tf.Wav2Vec2Config(vocab_size=32, **AUDIO)
    return tf.Wav2Vec2ForSequenceClassification(config), {
        "input_values": torch.randn(2, 100),
        "labels": torch.tensor([0, 1]),
    }


def vitmae() -> tuple[nn.Module, dict[str, Any]]:
    """Runs layers outside of what collects; its noise is given, to be the same twice."""
    config = tf.ViTMAEConfig(
        **VIT,
        decoder_num_attention_heads=2,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_intermediate_size=16,
    )
    return tf.ViTMAEForPreTraining(config), {"pixel_values": torch.randn(2, 3, 8, 8), "noise": torch.rand(2, 4)}


def llava() -> tuple[nn.Module, dict[str, Any]]:
    """Checks the number of image tokens against the images."""
    text = tf.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, use_cache=False
    )
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(**VIT), text_config=text, image_token_index=60, vision_feature_layer=-1
    )
    tokens = torch.cat([torch.full((2, 4), 60), ids()], 1)
    inputs = {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 8, 8), "labels": tokens}
    return tf.LlavaForConditionalGeneration(config), inputs


def dit() -> tuple[nn.Module, dict[str, Any]]:
    """Has a buffer that is a view."""
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        norm_num_groups=8,
        sample_size=4,
        patch_size=2,
        num_embeds_ada_norm=10,
        dropout=0.0,
    )
    times = torch.randint(0, 1000, (2,))
    return model, {
        "hidden_states": torch.randn(2, 4, 4, 4),
        "timestep": times,
        "class_labels": torch.tensor([1, 2]),
        "return_dict": False,
    }


def sd3() -> tuple[nn.Module, dict[str, Any]]:
    """Has a buffer that is a view, of which a part is used."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=4,
        patch_size=2,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=4,
    )
    return model, {
        "hidden_states": torch.randn(2, 4, 4, 4),
        "encoder_hidden_states": torch.randn(2, 3, 8),
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.randint(0, 1000, (2,)),
        "return_dict": False,
    }


class Wrapped(nn.Module):
    """Gives attributes of the model that it wraps as its own, as adapters of fine-tuning libraries do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.wrapped = model
        self.scale = nn.Parameter(torch.ones(1))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, **inputs: Tensor) -> Any:
        if type(self.scale).__module__.startswith("quantized."):
            raise TypeError("nothing here is quantized")
        none = torch.zeros_like(self.scale.detach())
        none.requires_grad = False
        result = self.wrapped(**inputs)
        return result.loss * self.scale + none


def wrapped() -> tuple[nn.Module, dict[str, Any]]:
    config = tf.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    tokens = ids()
    return Wrapped(tf.LlamaForCausalLM(config)), {"input_ids": tokens, "labels": tokens}


MODELS: list[Callable[[], tuple[nn.Module, dict[str, Any]]]] = [
    *(gpt2, t5, t5_inputs, segformer, nested, wav2vec2, vitmae, llava, dit, sd3, wrapped)
]


def state(model: nn.Module) -> list[Any]:
    """What of a model a capture might change."""
    return [
        (name, dict(module._forward_hooks), sorted(key for key in vars(module) if key != "_forward_hooks"))
        + tuple(value for key, value in vars(module).items() if isinstance(value, (bool, int, str)))
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_a_library_model_is_captured_as_it_is_and_left_so(
    build: Callable[[], tuple[nn.Module, dict[str, Any]]],
) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    for module in model.modules():  # two calls of a model that draws differ
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.BatchNorm2d):  # what it counts is not compared
            module.eval()
    before, environment = state(model), dict(os.environ)
    captured = capture(model, inputs)
    assert state(model) == before and dict(os.environ) == environment
    assert_computes(captured, model, (), inputs)


LOGGER, ONCE = logging.getLogger("of a model"), tf.logging.get_logger("transformers")


class Told(nn.Module):
    """Says something by every way there is, and carries a view as a buffer."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(8, 4).unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        LOGGER.warning("seen %s", x.shape)
        if LOGGER.isEnabledFor(logging.DEBUG):
            LOGGER.debug(f"and {x.dtype}")
        ONCE.warning_once("once")
        warnings.warn("as well", stacklevel=2)
        result: Tensor = (self.linear(x) + self.table).sum()
        return result


def test_what_a_model_says_is_left_out() -> None:
    model, x = Told(), torch.randn(8, 4)
    before = set(torch._dynamo.config.ignore_logging_functions)
    assert_computes(capture(model, x), model, (x,), {})
    assert torch._dynamo.config.ignore_logging_functions == before


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.distributions.Normal(self.linear(x), 1 + x.square()).log_prob(x).sum()
        return result


def test_a_distribution_is_not_asked_for_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile turns it off for good
    model, x = Sampled(), torch.randn(8, 4)
    assert_computes(capture(model, x), model, (x,), {})
    with pytest.raises(ValueError, match="within the support"):  # it still is, where it is not captured
        torch.distributions.Normal(0.0, 1.0).log_prob(torch.tensor(float("nan")))


class Recurrent(nn.Module):
    def __init__(self, cell: nn.RNNBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.cell(x)[0]
        return result


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_is_captured_as_one_op_over_all_steps(kind: Any) -> None:
    x = torch.randn(2, 30, 4)
    model = Recurrent(kind(4, 4, 2, batch_first=True, bidirectional=kind is nn.GRU))
    assert_computes(capture(model, x), model, (x,), {})
    model = Recurrent(kind(4, 4, 2, dropout=0.5))
    graphs = [capture(model, x).graph.graph, capture(model.eval(), x).graph.graph]
    assert all(len(graph.nodes) < 150 for graph in graphs)
    dropped = [any("dropout" in str(node.target) for node in graph.nodes) for graph in graphs]
    assert dropped == [True, False]


def test_a_transformer_is_captured_without_its_look_at_the_mask() -> None:
    class Translation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Transformer(4, 2, 1, 1, 8, 0.0)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layers(x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(3))
            return result

    model, x = Translation(), torch.randn(3, 2, 4)
    assert_computes(capture(model, x), model, (x,), {})


class KernelChosen(nn.Linear):
    """Attention by a chosen kernel, whose context is one of torch's two."""

    def __init__(self, chosen: Callable[[], Any]) -> None:
        super().__init__(4, 12)
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = super().forward(x).chunk(3, -1)
        with self.chosen():
            result: Tensor = nn.functional.scaled_dot_product_attention(query, key, value)
        return result


@pytest.mark.parametrize(
    "chosen",
    [
        lambda: torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]),
        lambda: torch.backends.cuda.sdp_kernel(False, enable_mem_efficient=False),  # deprecated
    ],
    ids=["sdpa_kernel", "sdp_kernel"],
)
def test_a_chosen_kernel_of_attention_computes_as_on_one_device(chosen: Callable[[], Any]) -> None:
    model, x = KernelChosen(chosen), torch.randn(2, 1, 3, 4)
    allowed = torch.nn.attention._cur_sdpa_kernel_backends()
    captured = capture(model, x)
    assert torch.nn.attention._cur_sdpa_kernel_backends() == allowed
    assert not any("flash" in str(node.target) for node in captured.graph.graph.nodes)
    assert_computes(captured, model, (x,), {})


class Checked(nn.Linear):
    """Functions of torch.linalg that raise an error for matrices without an inverse, of a parameter and of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        matrices = x[:, :, None] * x[:, None] + self.weight @ self.weight.mT
        factors, solved = torch.linalg.cholesky(matrices), torch.linalg.solve(matrices, x)
        return torch.linalg.inv(self.weight).sum() + factors.sum() + solved.sum() + torch.linalg.det(matrices).sum()


def test_checked_functions_of_linalg_compute_and_raise_as_on_one_device() -> None:
    model, x = Checked(4, 4), torch.randn(2, 4)
    captured = capture(model, x)
    assert_computes(captured, model, (x,), {})
    check = torch.ops.shardweave.checked_matrices.default
    checks = captured.graph.graph.find_nodes(op="call_function", target=check)
    assert [node.args[2] for node in checks] == ["linalg.cholesky", "torch.linalg.solve", "linalg.inv"]
    assert len(captured.graph.graph.find_nodes(op="placeholder")) == 4  # weight, bias, x and the tangent: no tokens
    parallel = sw.compile_parallel(model, sw.Cluster.local(1), x, progress=False)
    with torch.no_grad():
        model.weight.zero_()
        next(parallel.parameters()).zero_()
    for each in (model, parallel):
        with pytest.raises(torch.linalg.LinAlgError, match="linalg.cholesky"):
            each(x)
    with pytest.raises(CaptureError, match="inv_ex"):  # its calling convention has no place for the check
        torch.compile(Checked(4, 4), backend="shardweave")(x)


def test_what_a_model_raises_is_what_a_user_reads() -> None:
    model = tf.T5ForConditionalGeneration(tf.T5Config(**T5))
    with pytest.raises(CaptureError, match=r"it raises \w+Error: .*decoder_start_token_id.*\n.*in _shift_right"):
        capture(model, {"input_ids": ids(), "labels": ids()})
    model = t5()[0]
    with pytest.raises(CaptureError, match=r"in decoder .*it raises ValueError: .*exactly one of input_ids") as told:
        capture(model, {"input_ids": ids()})
    assert "output_capturing.py" not in str(told.value)  # whose `finally` ran after


def test_a_layer_dropped_at_random_is_refused_with_its_config_field() -> None:
    model = tf.Wav2Vec2Model(tf.Wav2Vec2Config(vocab_size=32, **{**AUDIO, "layerdrop": 0.5}))
    with pytest.raises(
        CaptureError, match="in encoder .*a branch depends on .*\n.*\nWhich layers run .*layerdrop to 0"
    ):
        capture(model, {"input_values": torch.randn(2, 100)})
