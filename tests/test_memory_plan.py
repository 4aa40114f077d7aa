"""``mlx-kda plan``: the numbers are those of a run, the table and the refusals."""

import json
import math

import mlx.core as mx
import pytest
from helpers.tiny import tiny_config, tiny_model

from mlx_kda import memory_plan
from mlx_kda.cache.policy import SPARE
from mlx_kda.cli.main import main
from mlx_kda.context import Context
from mlx_kda.models.kimi_linear import KimiLinearConfig


@pytest.fixture
def run(tiny_mlx, capsys):
    def call(*argv):
        status = main(["plan", str(tiny_mlx), *argv])
        return (status, *capsys.readouterr())

    return call


def kimi_48b():
    """The config of Kimi Linear 48B, from its published shapes."""
    full = [4, 8, 12, 16, 20, 24, 27]
    config = tiny_config(
        kda_layers=[i for i in range(1, 28) if i not in full],
        full_attn_layers=full,
        num_heads=32,
        num_hidden_layers=27,
        hidden_size=2304,
        intermediate_size=9216,
        vocab_size=163840,
        num_attention_heads=32,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        kv_lora_rank=512,
        num_experts=256,
        num_experts_per_token=8,
        moe_intermediate_size=1024,
    )
    config["linear_attn_config"]["head_dim"] = 128
    return KimiLinearConfig.from_dict(config)


def test_kimi_linear_48b():
    """42 MB of states, 8,064 B of latents per token; a window needs the same at any length."""
    config, n = kimi_48b(), 131072
    at = {p: memory_plan.need(config, 98 * 10**9, mx.bfloat16, n, p) for p in memory_plan.POLICIES}
    assert at["exact"].states == 20 * (32 * 128 * 128 * 4 + 3 * 3 * 4096 * 2)
    assert at["exact"].latents == 8064 * n
    # 512 values in 8 bits and 64 in 8 bits, a scale and a bias of 2 bytes for each 64
    assert at["int8"].latents == 7 * n * (512 + 64 + 9 * 4)
    assert at["int4"].latents == 7 * n * (256 + 64 + 9 * 4)
    window = memory_plan.need(config, 0, mx.bfloat16, 10**6, "window:4096+16")
    assert at["window:4096+16"].latents == window.latents == 7 * (4112 + SPARE) * 576 * 2
    assert at["exact"].total > 99 * 10**9


@pytest.mark.parametrize("policy", ["exact", "int8", "window:64+4"])
def test_the_numbers_are_those_of_a_run(policy):
    """States and latents byte for byte; the working set within what a machine is planned with."""
    model = tiny_model(hidden_size=128, kda_layers=[1, 3], full_attn_layers=[2, 4])
    n, step = 3072, 1024
    wanted = memory_plan.need(model.args, 0, mx.float32, n, policy, step)
    context = Context(model, policy=policy)
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    context.prefill([(7 * i) % 128 for i in range(n)], step=step)
    working = mx.get_peak_memory() - before - context.nbytes
    assert sum(c.nbytes for c in context.cache if hasattr(c, "cache")) == wanted.states
    store = context.cache[1].storage
    block = store.slots if policy == "window:64+4" else store.blocks[0]
    row = sum(a.nbytes for a in block) // block[0].shape[2]
    kept = n if policy != "window:64+4" else 68 + SPARE
    assert wanted.latents == 2 * row * kept
    assert working < wanted.working < 20 * working


def test_table_and_json(run):
    status, out, err = run("--context", "512")
    assert status == 0 and err == ""
    for words in ("512 tokens", "window:4096+16,int8", "fits", "this machine: ", "predicted"):
        assert words in out
    _, out, _ = run("--context", "512", "--policy", "int4", "--policy", "exact", "--json")
    report = json.loads(out)
    four, exact = report["policies"]
    assert (four["policy"], exact["policy"]) == ("int4", "exact")
    assert four["latents"] < exact["latents"] == 512 * (32 + 32) * 4
    parts = ("weights", "states", "latents", "working")
    assert all(one["total"] == sum(one[p] for p in parts) and one["fits"] for one in (four, exact))
    assert report["memory"]["usable"] > 10**9


def test_a_context_beyond_the_model_s_is_one_line_and_status_2(run):
    status, out, err = run("--context", "513")
    assert status == 2 and out == "" and err.count("\n") == 1
    assert "513 tokens are more than the model's context of 512" in err


@pytest.mark.parametrize(
    ("policy", "words"), [("most", "'most' is not one of"), ("window:0", "at least 1 token")]
)
def test_a_policy_that_is_none_is_one_line_and_status_2(run, capsys, policy, words):
    with pytest.raises(SystemExit) as stop:
        run("--policy", policy)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and words in err


def test_this_machine_s_memory_is_a_number_and_has_a_source():
    memory = memory_plan.machine()
    assert 0 < memory.usable <= memory.total and memory.source
    assert math.log10(memory.total) > 8.5


def test_a_container_s_limit_counts(monkeypatch):
    monkeypatch.setattr(memory_plan, "_container_limit", lambda: 2**28)
    assert memory_plan.machine() == memory_plan.MachineMemory(2**28, 2**28, "the container's limit")
