"""`mlx-kda bench model` and `buffers`: what they run, and what they report."""

import launches
import mlx.core as mx
import pytest
from helpers.tiny import difference, tiny_config, tiny_model, tiny_weights, tokens, write_model
from mlx.utils import tree_flatten
from tolerances import STOCK

from mlx_kda.bench import buffers, model, shapes
from mlx_kda.bench.subject import Subject
from mlx_kda.errors import UserError
from mlx_kda.layers import blas_layout
from mlx_kda.memory_plan import MachineMemory
from mlx_kda.models.hybrid_config import DENSE, MLA, MOE
from mlx_kda.models.kimi_linear import KimiLinearConfig

SMALL = {"shape": "48b", "layers": 4, "vocab": 64, "dtype": "float32", "runner": "ops"}


@pytest.fixture
def small(monkeypatch):
    """The 48B's shape with small matrices."""
    monkeypatch.setitem(shapes.SHAPES, "48b", launches.CONFIG)


def test_the_48b_shape_is_its_first_layers_and_the_rest_of_its_sizes():
    """27 layers as published, every fourth MLA and the last; a part of them keeps the widths."""
    whole = KimiLinearConfig.from_dict(shapes.config("48b"))
    assert [i + 1 for i, kind in enumerate(whole.layer_types) if kind == MLA] == [
        *(4, 8, 12, 16, 20, 24),
        27,
    ]
    assert whole.mlp_layer_types == (DENSE, *(MOE,) * 26)
    few = KimiLinearConfig.from_dict(shapes.config("48b", layers=5, vocab_size=512))
    assert few.layer_types == whole.layer_types[:5] and few.vocab_size == 512
    assert few.num_experts == whole.num_experts == 256 and few.hidden_size == 2304
    assert shapes.config("48b")["linear_attn_config"]["full_attn_layers"][-1] == 27


def test_a_candidate_too_slow_for_the_next_context_is_left_out(monkeypatch):
    rows = {"fast": 100.0, "slow": 10.0}

    def both(models, prompt, *_):
        for name in models:
            row = {"candidate": name, "context": prompt.size, "tokens_per_second": rows[name]}
            yield from ({**row, "phase": phase} for phase in ("prefill", "decode"))

    monkeypatch.setattr(model, "_both_phases", both)
    models = dict.fromkeys(rows, tiny_model())
    found = list(model.run(models, [10, 40, 41, 4000], budget=2.0))
    told = [(r["context"], r["candidate"]) for r in found if r["phase"] == "prefill"]
    assert told == [(10, "fast"), (10, "slow"), (40, "fast"), (40, "slow"), (41, "fast")]


@pytest.mark.parametrize("q_bits", [None, 4])
def test_models_of_one_shape_are_run_side_by_side(small, q_bits):
    found = list(model.of(Subject(**SMALL, q_bits=q_bits), contexts=[8], samples=3, budget=1))
    assert [r["candidate"] for r in found] == ["ours", "mlx-lm"] * 2
    assert all(r["launches"] > 0 for r in found if r["phase"] == "decode")


@pytest.mark.parametrize(
    "candidates, factor, loaded, told",
    [
        (model.CANDIDATES, 3, [["mlx-lm", "ours"]], ["ours"]),
        (model.CANDIDATES, 1.5, [["ours"], ["mlx-lm"]], ["ours (alone)", "mlx-lm (alone)"]),
        (["mlx-lm"], 1.5, [["mlx-lm"]], ["mlx-lm"]),
    ],
)
def test_models_that_do_not_fit_together_are_measured_one_after_the_other(
    small, monkeypatch, candidates, factor, loaded, told
):
    """A Mac that holds a 48B model once must not load it twice."""
    seen = []

    def run(models, **_):
        seen.append(sorted(models))
        yield {"candidate": next(iter(models))}

    monkeypatch.setattr(model, "run", run)
    weights = model._weights(Subject(**SMALL).ours())
    usable = MachineMemory(10**12, int(factor * weights), "a test")
    monkeypatch.setattr(model, "machine", lambda: usable)
    rows = list(model.of(Subject(**SMALL), candidates))
    assert [row["candidate"] for row in rows] == told and seen == loaded


def test_settings_of_command_buffers_take_turns(monkeypatch):
    turns = []

    def measured(arguments, setting):
        turns.append(setting.get(buffers.NUMBERS))
        row = {"context": 8, "tokens_per_second": 1.0, "spread": 0.0, "peak_mb": len(turns)}
        yield from ({**row, "phase": phase, "ms": len(turns)} for phase in ("prefill", "decode"))

    monkeypatch.setattr(buffers, "_measured", measured)
    rows = list(buffers.run([], rounds=3))
    assert turns == [None, "400", "2000"] * 3
    assert [(r["candidate"], r["phase"], r["ms"], r["peak_mb"]) for r in rows[:3]] == [
        ("MLX's own", "prefill", 4, 7),
        ("MLX's own", "decode", 4, 7),
        ("1000, 400", "prefill", 5, 8),
    ]
    assert not rows[0]["steady"]

    turns.clear()
    monkeypatch.setattr(buffers, "_measured", lambda *a: stop() if len(turns) > 3 else measured(*a))

    def stop():
        raise KeyboardInterrupt

    told = []  # what was measured before the interrupt
    with pytest.raises(KeyboardInterrupt):
        for row in buffers.run([], rounds=3):
            told.append(row["samples"])
    assert told == [2, 2, 1, 1, 1, 1]


def test_each_setting_of_command_buffers_has_a_process_of_its_own(monkeypatch, folder):
    monkeypatch.setenv(buffers.OPS, "7")
    assert buffers.OPS not in buffers._environment({})
    assert buffers._environment({buffers.OPS: "9"})[buffers.OPS] == "9"
    options = ["--contexts=8", "--samples=3", "--budget=0.1"]
    rows = buffers._measured([str(folder), *options], {})
    assert [(r["candidate"], r["phase"]) for r in rows] == [("ours", "prefill"), ("ours", "decode")]
    with pytest.raises(UserError, match="bench model ended with status 2: mlx-kda: "):
        buffers._measured([str(folder / "nowhere")], {})


@pytest.mark.parametrize(
    "options, told",
    [
        ({"folder": "m", "shape": "48b"}, "either a model's folder or"),
        ({"folder": "m", "layers": 4}, "--layers belongs to --shape"),
        ({"folder": "m", "q_bits": 4}, "--q-bits belongs to --shape"),
        ({"folder": "m", "dtype": "float32"}, "--dtype belongs to --shape"),
        ({"shape": "48b", "layers": 28}, "48b has 27"),
        ({"shape": "48b", "layers": 3, "dtype": "float32"}, "--layers 4 or more"),
    ],
)
def test_what_cannot_be_run_is_refused_before_it_is_loaded(options, told):
    with pytest.raises(UserError, match=told):
        Subject(**options).prepare(stock=True)


def test_16_bit_experts_are_refused_where_mlx_lm_cannot_run_them(tmp_path):
    """They ended in a RuntimeError of MLX after both models had been built."""
    assert mx.default_device() == mx.cpu
    with pytest.raises(UserError, match="cannot run 16-bit experts on a CPU"):
        Subject(shape="48b").prepare(stock=True)
    Subject(shape="48b").prepare()
    Subject(shape="48b", q_bits=4).prepare(stock=True)
    config = tiny_config()
    weights = {name: w.astype(mx.bfloat16) for name, w in tiny_weights(config).items()}
    folder = write_model(tmp_path / "m", config, weights)
    with pytest.raises(UserError, match="cannot run 16-bit experts on a CPU"):
        Subject(folder).stock()


def test_every_model_prefills_to_the_same_logits_and_ours_asks_for_fewer_launches(
    folder, monkeypatch
):
    """mlx-lm leaves the head out until its last token, ours computes it for that one alone."""
    models = {}
    monkeypatch.setattr(model, "run", lambda given, **_: models.update(given) or [])
    list(model.of(Subject(folder)))
    monkeypatch.undo()
    layouts = ["mlx-lm, our layout of weights"] if blas_layout.applies() else []
    assert list(models) == ["ours", "mlx-lm", *layouts]
    prompt = tokens(24)
    want = models["ours"](prompt)[:, -1]
    for each in models.values():
        assert difference(model._absorb(each, prompt, each.make_cache()), want) < STOCK

    rows = list(model.run(models, [24], decode=2, samples=3, budget=1))
    assert [(r["phase"], r["candidate"]) for r in rows] == [
        (phase, name) for phase in ("prefill", "decode") for name in models
    ]
    launches = {r["candidate"]: r["launches"] for r in rows if r["phase"] == "decode"}
    assert launches["ours"] < 0.8 * launches["mlx-lm"]
    assert all(launches["mlx-lm"] == launches[name] for name in layouts)
    weights = sum(w.nbytes for _, w in tree_flatten(models["ours"].parameters())) / 1e6
    assert all(weights < r["peak_mb"] < 2 * weights + 10 for r in rows)
