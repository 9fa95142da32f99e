"""The sizes of a model: what cannot be is refused with what would fit, what is left open is settled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from summa3d.errors import ConfigError
from summa3d.nn.config import ModelConfig

LLAMA3 = {"rotary_scaling": "llama3", "rotary_factor": 8.0, "rotary_low": 1.0, "rotary_high": 4.0, "rotary_context": 64}
LLAMA = ModelConfig(family="llama", hidden=72, heads=12, kv_heads=2)
VIT = ModelConfig(family="vit", hidden=24, heads=12, image=9, patch=3, classes=7)


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        (LLAMA, {"kv_heads": 5}, ["kv_heads 5", "1, 2, 3, 4, 6, 12"]),
        (LLAMA, {"hidden": 36}, ["heads of 3", "even"]),
        (LLAMA, {"rotary_base": 0.0}, ["rotary_base", "above 0"]),
        (LLAMA, {"rotary_scaling": "yarn"}, ["'yarn'", "default, linear, llama3"]),
        (LLAMA, {"rotary_scaling": "linear"}, ["'linear' needs model.rotary_factor"]),
        (LLAMA, {"rotary_scaling": "linear", "rotary_factor": 2.0, "rotary_low": 1.0}, ["does not read model.rotary_low"]),
        (LLAMA, {**LLAMA3, "rotary_low": 4.0}, ["rotary_low 4.0 must be below model.rotary_high 4.0"]),
        (VIT, {"tied_head": True}, ["model.tied_head", "llama"]),
        (LLAMA, {"patch": 4}, ["model.patch", "llama does not read it", "vit"]),
        (LLAMA, {"family": "bert"}, ["model.kv_heads is 2", "gpt2, llama"]),
        (LLAMA, {"activation": "relu2"}, ["model.activation is relu2", "gpt2"]),
        (ModelConfig(), {"activation": "swish"}, ["'swish'", "gelu_tanh, gelu, relu2"]),
        (LLAMA, {"family": "lama"}, ["'lama'", "gpt2, bert, llama, mixtral, qwen2_moe, qwen3_moe, olmoe, vit"]),
        (VIT, {"patch": 4, "sequence": 128}, ["model.image 9", "1, 3, 9"]),
        (VIT, {"sequence": 11}, ["model.sequence is 11", "10 positions"]),
        (VIT, {"vocabulary": 37}, ["model.vocabulary is 37", "no tokens"]),
        (VIT, {"classes": 0}, ["model.classes is 0"]),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(config, change, says):
    with pytest.raises(ConfigError) as raised:
        replace(config, **change)
    for text in says:
        assert text in str(raised.value)


def test_the_image_makes_the_sequence():
    assert ModelConfig(family="vit").sequence == 65
    assert ModelConfig(family="vit", image=224, patch=16).sequence == 197
