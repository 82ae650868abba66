# SPDX-License-Identifier: Apache-2.0
"""The plain NemotronH against transformers' class: loss and every gradient, in float64."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch.nn import functional

from lora_suite.blueprint.shape import HybridShape, ModelShape
from lora_suite.train.backends.dtensor import fast
from lora_suite.train.backends.dtensor.build import build as build_plain
from lora_suite.train.backends.dtensor.fast.hybrid import HybridDecoder, Parts
from lora_suite.train.batch import MicroBatch, Segments
from lora_suite.train.fast.collectives import ExpertParallel
from lora_suite.train.fast.experts import FramedExperts, StackedExperts
from lora_suite.train.fast.linears import FramedLinear, StackedLinear, refresh
from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.experts import ExpertAdapter
from lora_suite.train.models.mamba import MambaSizes
from lora_suite.train.models.router import Routes
from tests.train.dtensor.ranks import LORA, TINY_HYBRID, Setting, run_ranks
from tests.train.dtensor.test_fast import BLOCK, PADDED, build_fast, refusal, resumed, switched, trace, wake
from tests.train.lora.adapters import bank_of, spec
from tests.train.models.test_mamba import nemotron  # noqa: F401

KIND = spec(rank=3, alpha=6.0)
HYBRID = HybridShape(
    pattern=("mamba", "moe", "attention", "mlp", "mamba", "moe"),
    mamba_heads=4,
    mamba_head_dim=6,
    mamba_groups=2,
    state_size=5,
    conv_kernel=4,
    conv_bias=True,
    mamba_bias=True,
    experts=8,
    experts_per_token=3,
    expert_intermediate=10,
    shared_intermediate=14,
)
SHAPE = ModelShape(
    family="nemotron_h",
    layers=6,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=12,
    vocab=40,
    tied_head=False,
    qk_norm=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    max_positions=64,
    hybrid=HYBRID,
)


def theirs(module, best_groups):
    """transformers' model with random weights, all of them far from their usual first values."""
    from transformers import NemotronHConfig

    config = NemotronHConfig(
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
        vocab_size=40,
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=12,
        ssm_state_size=5,
        mamba_num_heads=4,
        mamba_head_dim=6,
        n_groups=2,
        conv_kernel=4,
        chunk_size=4,
        use_bias=True,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=10,
        moe_shared_expert_intermediate_size=14,
        n_group=4,
        topk_group=best_groups,
        routed_scaling_factor=2.5,
        tie_word_embeddings=False,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = module.NemotronHForCausalLM(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, tensor in sorted(model.state_dict().items()):
            tensor.normal_(0.0, 0.3, generator=generator)
    return model


def ours(adapted, best_groups):
    """Our model, with adapters beside all linears or none."""
    adapters = []

    def linear(name, inputs, widths, bias):
        if not adapted:
            return StackedLinear(inputs, widths, bias, torch.float64, torch.device("cpu"))
        by_position = {
            position: Adapter(f"{name}.{position}", inputs, width, KIND)
            for position, width in enumerate(widths)
        }
        adapters.extend(by_position.values())
        return FramedLinear(inputs, widths, bias, by_position, torch.float64, torch.device("cpu"))

    def experts(name, count, inputs, out):
        if not adapted:
            return StackedExperts(count, inputs, out, torch.float64, torch.device("cpu"))
        adapter = ExpertAdapter(name, inputs, out, KIND, count, "loop")
        adapters.append(adapter)
        return FramedExperts(count, inputs, out, adapter, torch.float64, torch.device("cpu"))

    def tensor(*size, wide=False):
        return torch.nn.Parameter(torch.empty(size, dtype=torch.float64), requires_grad=not adapted)

    sizes = MambaSizes.of(HYBRID, 4, 1e-5, (0.001, float("inf")))
    alone = ExpertParallel(0, 1, "")
    routes = Routes(8, 3, 4, best_groups, True, 2.5)
    model = HybridDecoder(Parts(SHAPE, sizes, routes, 1e-5, None, linear, experts, tensor, alone))
    if adapters:
        bank_of(adapters)
    return model


def refreshed(model):
    modules = list(model.modules())
    refresh([each for each in modules if isinstance(each, FramedLinear)])
    for each in modules:
        if isinstance(each, FramedExperts):
            each.refresh()


IDS = torch.randint(0, 40, (2, 11), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 40, (2, 11), generator=torch.Generator().manual_seed(2))


def loss_of(logits):
    return functional.cross_entropy(logits.flatten(0, 1), LABELS.flatten())


@pytest.fixture(params=[4, 2], ids=["all-groups", "best-groups"])
def reference(nemotron, request):  # noqa: F811
    return theirs(nemotron, request.param), request.param


def test_full_training_is_transformers(reference):
    expected, groups = reference
    model = ours(False, groups)
    model.load(lambda weight: expected.state_dict()[weight.name])
    loss = loss_of(model(IDS) @ model.head.t())
    loss.backward()
    wanted = loss_of(expected(IDS).logits)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    gradients = {name: parameter.grad for name, parameter in expected.named_parameters()}
    found = by_name(model)
    assert found.keys() == expected.state_dict().keys()
    for name, gradient in found.items():
        if "mixer.gate." in name:
            assert gradient is None
        else:
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-13)


def by_name(model):
    """Gradients of our model by transformers' names: where a weight's view would lie in its tensor's."""
    values = {name: tensor.clone() for name, tensor in model.named_tensors()}
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    with torch.no_grad():
        for parameter in trained:
            parameter.copy_(parameter.grad)
    kept = {id(parameter) for parameter in trained}
    assert len(kept) == len([p for p in model.parameters() if p.requires_grad])
    frozen = {name for name in values if "mixer.gate." in name}
    return {name: None if name in frozen else tensor for name, tensor in model.named_tensors()}


def test_adapters_are_trained_as_if_they_were_in_the_weights(reference):
    expected, groups = reference
    model = ours(True, groups)
    model.load(lambda weight: expected.state_dict()[weight.name])
    refreshed(model)
    loss = loss_of(model(IDS) @ model.head.t())
    loss.backward()
    merged(model, expected)
    wanted = loss_of(expected(IDS).logits)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    seen = 0
    gradients = {name: parameter.grad for name, parameter in expected.named_parameters()}
    for name, adapter in adapters_of(model).items():
        seen += 1
        # Of W + s·B·A: dB = s·dW·Aᵀ, dA = s·Bᵀ·dW.
        dw = gradients[f"{name}.weight" if f"{name}.weight" in gradients else name]
        scale = KIND.scale
        torch.testing.assert_close(adapter.b.grad, scale * dw @ adapter.a.mT, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(adapter.a.grad, scale * adapter.b.mT @ dw, rtol=1e-10, atol=1e-13)
    assert seen == 2 * 2 + 2 * 4 + 4 + 2


def adapters_of(model):
    """Adapters by the transformers name of what they are beside."""
    from lora_suite.train.backends.dtensor.fast.hybrid import STACKS

    found = {}
    for layer in model.layers:
        for stack, names in STACKS.items():
            linear = getattr(layer, stack, None)
            if isinstance(linear, FramedLinear):
                for name, adapter in zip(names, linear.by_position.values(), strict=True):
                    found[f"{layer.name}.{name}"] = adapter
            elif linear is not None:
                found[f"{layer.name}.{names[0]}"] = linear.adapter
    return found


@torch.no_grad()
def merged(model, expected):
    """Add what the adapters add to transformers' weights."""
    parameters = dict(expected.named_parameters())
    for name, adapter in adapters_of(model).items():
        weight = parameters.get(f"{name}.weight", parameters.get(name))
        weight += KIND.scale * adapter.b @ adapter.a


PER_EXPERT = (LORA, PADDED, f"{BLOCK}.experts=per_expert")


def hybrid(*overrides, precision="float32"):
    return Setting(overrides, TINY_HYBRID, precision)


def both(setting):
    return trace(setting.build(), 2), trace(build_fast(setting), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [(), PER_EXPERT, (LORA, f"{BLOCK}.exclude_modules=['*out_proj*']", f"{BLOCK}.dim=3")],
    ids=["full", "lora", "lora-on-some"],
)
def test_a_recipe_trains_like_on_the_plain_path(tmp_path, overrides):
    """The plain path has the recurrence in float32 even in float64, so they agree no better than that."""
    setting = hybrid(*overrides, precision="float64")
    plain, quick = run_ranks(1, tmp_path / "ranks", both, setting)[0]
    assert quick["seen"] == pytest.approx(plain["seen"], rel=1e-5)
    assert quick["gradients"].keys() == plain["gradients"].keys()
    for name, gradient in plain["gradients"].items():
        bound = 1e-4 * gradient.abs().max().item()
        assert bound > 0.0, name
        torch.testing.assert_close(quick["gradients"][name], gradient, rtol=0.0, atol=bound)


def test_its_adapters_change_the_output_and_can_be_switched_off(tmp_path):
    setting = hybrid(*PER_EXPERT, precision="float64")
    base, awake_loss, off, before, after, _ = run_ranks(1, tmp_path / "ranks", switched, setting)[0]
    assert off == base != awake_loss
    assert before != after


@pytest.mark.parametrize("overrides", [(), PER_EXPERT], ids=["full", "lora"])
def test_its_state_comes_back(tmp_path, overrides):
    left, right = run_ranks(1, tmp_path / "ranks", resumed, hybrid(*overrides))[0]
    assert left == right


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((f"{BLOCK}.experts=shared",), "lora_cfg.experts"),
        (("policy.dtensor_cfg.experts_implementation=loop",), "experts_implementation"),
        (("policy.precision=float32",), "precision"),
    ],
)
def test_what_it_cannot_do_is_named(overrides, reason):
    assert refusal(hybrid(*PER_EXPERT, precision="bfloat16"), memory=2**40) is None
    asked = hybrid(LORA, PADDED, *overrides, precision="bfloat16")
    assert reason in str(refusal(asked, memory=2**40))


def test_experts_whose_rows_are_not_aligned_are_named(tmp_path):
    path = tmp_path / "narrow.json"
    path.write_text(json.dumps(json.loads(TINY_HYBRID.read_text()) | {"moe_intermediate_size": 36}))
    asked = Setting((LORA, PADDED, *PER_EXPERT), path, precision="bfloat16")
    assert "moe_intermediate_size is no multiple of 8" in str(refusal(asked, memory=2**40))


def packed_and_apart(setting):
    """Loss and gradients of rows of different lengths, packed and one by one."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 256, (length + 1,), generator=generator) for length in (5, 1, 7, 3)]
    lengths = tuple(len(row) - 1 for row in rows)
    packed = MicroBatch(
        torch.cat([row[:-1] for row in rows])[None],
        torch.cat([row[1:] for row in rows])[None],
        torch.cat([torch.arange(length) for length in lengths])[None],
        Segments.of(lengths),
    )
    apart = [MicroBatch(row[None, :-1], row[None, 1:]) for row in rows]
    seen = []
    for batches in ([packed], apart):
        backend = build_fast(setting)
        wake(backend)
        loss = backend.forward_backward(batches, sum(lengths))
        backend.sync_gradients()
        seen.append((loss.item(), backend.bank.master_gradient.clone()))
    return seen


def test_packed_rows_train_like_rows_apart(tmp_path):
    setting = hybrid(*PER_EXPERT, "policy.sequence_packing.enabled=true", precision="float64")
    packed, apart = run_ranks(1, tmp_path / "ranks", packed_and_apart, setting)[0]
    assert packed[0] == pytest.approx(apart[0], rel=1e-12)
    torch.testing.assert_close(packed[1], apart[1], rtol=1e-9, atol=1e-14)


@pytest.mark.slow
def test_the_program_trains_it_and_every_invariant_holds(new_run):
    losses = []
    for name, build in (("plain", build_plain), ("fast", partial(fast.build, gpu=False))):
        run = new_run(name)
        overrides = (LORA, f"{BLOCK}.experts=per_expert", f"policy.model_name={TINY_HYBRID}")
        assert run.train(*overrides, backend=build) == 0
        assert [each.name for each in run.record.invariants if each.ok is False] == []
        losses.append(list(run.metrics["train/loss"].values()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
