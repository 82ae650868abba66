# SPDX-License-Identifier: Apache-2.0
"""Which linears get an adapter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_suite.blueprint import model_linears, read_shape, select_sites
from lora_suite.config.errors import ConfigError
from tests.blueprint.helpers import MODELS, dtensor, megatron, t2_linears

RANK = 8


def count(sites):
    """Return (adapters, parameters at rank 8)."""
    return len(sites), sum(site.params(RANK) for site in sites)


def select(folder, lora, tied_head=False):
    return select_sites(t2_linears(folder), lora, tied_head, "here")


def last_names(sites):
    return {site.name.rpartition(".")[2] for site in sites}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (14, 16_384)),
        ({"match_all_linear": True}, (14, 16_384)),
        ({"target_modules": ["*_proj"]}, (14, 16_384)),
        ({"target_modules": ["*"]}, (14, 16_384)),
        ({"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}, (8, 7_168)),
        ({"target_modules": ["*.self_attn.*"]}, (8, 7_168)),
        ({"target_modules": ["*_proj", "lm_head"]}, (15, 16_384 + 2_560)),
        ({"target_modules": ["lm_head"]}, (1, 2_560)),
        ({"target_modules": ["*lm_head"]}, (1, 2_560)),
        ({"target_modules": ["model.layers.1.self_attn.q_proj"]}, (1, 1_024)),
        ({"target_modules": ["*.layers.1.*"]}, (7, 8_192)),
        ({"target_modules": ["model.layers.*.q_proj"]}, (2, 2_048)),
        ({"exclude_modules": ["*.mlp.*"]}, (8, 7_168)),
        ({"exclude_modules": ["gate_proj", "up_proj", "down_proj"]}, (8, 7_168)),
        ({"exclude_modules": ["*.mlp.*"], "match_all_linear": False}, (8, 7_168)),
    ],
)
def test_dtensor_counts_worked_out_by_hand(tmp_path, changes, expected):
    assert count(select(tmp_path, dtensor(**changes))) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (14, 16_384)),
        ({"fused": True}, (8, 13_312)),
        ({"target_modules": ["linear_qkv"]}, (6, 5_120)),  # its parts: 2 layers × 8 × (128 + 96 + 96)
        ({"target_modules": ["linear_qkv"], "fused": True}, (2, 3_072)),
        ({"target_modules": ["linear_qkv", "linear_proj"]}, (8, 7_168)),
        ({"target_modules": ["linear_q"]}, (2, 2_048)),
        ({"target_modules": ["q_proj", "linear_v"]}, (4, 3_584)),
        ({"target_modules": ["linear_fc1"]}, (4, 6_144)),
        ({"target_modules": ["linear_fc1_up"]}, (2, 3_072)),
        ({"target_modules": ["linear_fc1", "linear_fc2"], "fused": True}, (4, 8_192)),
        ({"target_modules": ["down_proj"], "fused": True}, (2, 3_072)),
        ({"target_modules": ["decoder.layers.0.self_attention.linear_qkv"]}, (3, 2_560)),
        ({"target_modules": ["*.layers.0.*"], "fused": True}, (4, 6_656)),
        ({"exclude_modules": ["linear_fc1", "linear_fc2"]}, (8, 7_168)),
        ({"exclude_modules": ["*.mlp.*"], "fused": True}, (4, 5_120)),
        ({"target_modules": ["*", "output_layer"], "fused": True}, (9, 13_312 + 2_560)),
        ({"target_modules": ["lm_head"]}, (1, 2_560)),
    ],
)
def test_megatron_counts_worked_out_by_hand(tmp_path, changes, expected):
    assert count(select(tmp_path, megatron(**changes))) == expected


def test_separate_sites_have_transformers_names_and_fused_ones_megatrons(tmp_path):
    assert [site.name for site in select(tmp_path, megatron())][:2] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
    ]
    fused = select(tmp_path, megatron(fused=True))
    assert [(site.name, site.in_features, site.out_features) for site in fused[:4]] == [
        ("decoder.layers.0.self_attention.linear_qkv", 64, 128),
        ("decoder.layers.0.self_attention.linear_proj", 64, 64),
        ("decoder.layers.0.mlp.linear_fc1", 64, 256),
        ("decoder.layers.0.mlp.linear_fc2", 128, 64),
    ]


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            dtensor(target_modules=["q_prj"]),
            "here.target_modules: 'q_prj' matches no linear; the nearest is q_proj",
        ),
        (dtensor(target_modules=["q_proj", "linear_fc1x"]), "'linear_fc1x' matches no linear"),
        (dtensor(exclude_modules=["out_proj"]), "here.exclude_modules: 'out_proj' matches no linear"),
        (dtensor(target_modules=["proj"]), "'proj' matches no linear"),
        (dtensor(target_modules=["layers.0.self_attn.q_proj"]), "matches no linear"),
        (dtensor(target_modules=["q_proj*x"]), "matches no linear"),
        (dtensor(target_modules=[".*_proj"]), "matches no linear"),  # a pattern is not a regular expression
        (dtensor(target_modules=["*norm*"]), "matches no linear"),
        (dtensor(target_modules=["linear_qkv"]), "matches no linear"),
        (dtensor(exclude_modules=["*"]), "no linear would get an adapter"),
        (dtensor(match_all_linear=False), "no linear would get an adapter"),
        (
            megatron(target_modules=["linear_fc1x"]),
            "'linear_fc1x' matches no linear; the nearest is linear_fc1",
        ),
        (
            megatron(target_modules=["linear_q"], fused=True),
            "'linear_q' is a part of linear_qkv, which fused: true adapts as one",
        ),
        (
            megatron(target_modules=["q_proj", "k_proj", "v_proj"], fused=True),
            "'v_proj' is a part of linear_qkv",
        ),
        (
            megatron(exclude_modules=["linear_fc1_gate"], fused=True),
            "'linear_fc1_gate' is a part of linear_fc1",
        ),
        (megatron(target_modules=["*.up_proj"], fused=True), "'*.up_proj' is a part of linear_fc1"),
    ],
)
def test_entries_that_match_nothing_are_errors(tmp_path, lora, message):
    with pytest.raises(ConfigError) as caught:
        select(tmp_path, lora)
    assert message in str(caught.value)


def test_every_entry_that_matches_nothing_is_named(tmp_path):
    with pytest.raises(ConfigError) as caught:
        select(tmp_path, dtensor(target_modules=["aa", "q_proj", "bb"]))
    assert "'aa'" in str(caught.value)
    assert "'bb'" in str(caught.value)
    assert "'q_proj'" not in str(caught.value)


def test_a_head_that_is_the_embedding_takes_no_adapter(tmp_path):
    with pytest.raises(ConfigError, match="the head of this model is its embedding"):
        select(tmp_path, dtensor(target_modules=["lm_head"]), tied_head=True)
    assert count(select(tmp_path, dtensor(), tied_head=True)) == (14, 16_384)


def test_the_hybrid_model_is_adapted_where_it_has_plain_linears():
    linears = model_linears(read_shape(MODELS / "nemotron-3-nano-30b-a3b.json"))
    everything = select_sites(linears, dtensor(), False, "here")
    kinds = {
        kind: sum(site.kind == kind for site in everything)
        for kind in ("mamba_in", "mamba_out", "q", "shared")
    }
    assert kinds == {"mamba_in": 23, "mamba_out": 23, "q": 6, "shared": 46}
    assert not {"router", "experts", "head"} & {site.kind for site in everything}
    without = select_sites(linears, dtensor(exclude_modules=["*out_proj*"]), False, "here")
    assert len(everything) - len(without) == 23
    for entry, message in [
        ("*.experts.*", "routed experts"),
        ("*experts.up_proj", None),  # the shared expert answers to this one
        ("gate_proj", "matches no linear"),
    ]:
        lora = dtensor(target_modules=[entry])
        if message is None:
            assert last_names(select_sites(linears, lora, False, "here")) == {"up_proj"}
        else:
            with pytest.raises(ConfigError, match=message):
                select_sites(linears, lora, False, "here")


def test_experts_and_their_router_are_never_adapted_and_say_why():
    linears = model_linears(read_shape(MODELS / "tiny-qwen3-moe.json"))
    for lora in (dtensor(), megatron()):
        sites = select_sites(linears, lora, False, "here")
        # 2 · 8 · (128 + 96 + 96 + 128): q, k, v, o of two layers
        assert count(sites) == (8, 7_168)
    assert count(select_sites(linears, megatron(fused=True), False, "here")) == (4, 5_120)
    for entry, message in [
        ("gate_proj", "'gate_proj' names routed experts"),
        ("model.layers.0.mlp.experts.3.down_proj", "matches no linear"),
        ("down_proj", "'down_proj' names routed experts"),
        ("linear_fc1", "'linear_fc1' names routed experts"),
        ("*.mlp.gate", "names the router of experts"),
        ("gate", "'gate' names the router of experts, which takes no adapter here"),
    ]:
        for lora in (megatron(target_modules=[entry]), megatron(target_modules=[entry], fused=True)):
            with pytest.raises(ConfigError) as caught:
                select_sites(linears, lora, False, "here")
            assert message in str(caught.value)


NAMES = st.lists(
    st.sampled_from(["q", "*", ".", "_proj", "model", "layers", "0", "lm_head"]), max_size=6
).map("".join)


LINEARS = model_linears(read_shape(MODELS / "tiny-llama.json"))
LORA = dtensor()


@settings(deadline=None)
@given(entry=NAMES)
def test_a_selection_holds_exactly_the_names_that_match(entry):
    lora = LORA.model_copy(update={"target_modules": [entry]})
    try:
        chosen = {site.name for site in select_sites(LINEARS, lora, False, "here")}
    except ConfigError:
        chosen = set()
    for linear in LINEARS:
        last = linear.name.split(".")[-1]
        if "*" not in entry:
            expected = entry in (linear.name, last)
        else:
            expected = glob(entry, linear.name) and (last != "lm_head" or "lm_head" in entry)
        assert (linear.name in chosen) is expected


def glob(pattern, text):
    """Match a pattern whose only sign is `*`, by trying every length for the first one."""
    head, star, rest = pattern.partition("*")
    if not star:
        return pattern == text
    return text.startswith(head) and any(glob(rest, text[i:]) for i in range(len(head), len(text) + 1))
