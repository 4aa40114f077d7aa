"""Rules, byte budgets and plans: what is asked for is written, or refused."""

import itertools
import json
import random
import re
from dataclasses import replace

import mlx.core as mx
import pytest
from helpers.checkpoints import read_all, stock_logits
from helpers.tiny_checkpoint import weights, write_checkpoint
from tolerances import STOCK

from mlx_kda.cli.main import main
from mlx_kda.convert import convert, plan
from mlx_kda.convert.bit_budget import BitBudget, allot, errors_of, measure, sensitivity
from mlx_kda.convert.conversion_plan import plan_conversion
from mlx_kda.convert.recipe import ConvertOptions, Rule
from mlx_kda.convert.resume import ResumeState
from mlx_kda.errors import UserError
from mlx_kda.models import load_model
from mlx_kda.weights.quantization import Quantization
from mlx_kda.weights.source import open_source

TOKENS = mx.array([[1, 5, 9, 200, 7, 3, 3, 250, 42]])
RULES = ["mlp.switch_mlp.*=4,32", "self_attn.o_proj=8,64"]


def packings(folder) -> dict[str, tuple]:
    """Path -> (bits, group size, mode) of the packed weights of a folder, by its config."""
    config = json.loads((folder / "config.json").read_text())["quantization"]
    default = {key: config[key] for key in ("bits", "group_size", "mode")}
    paths = [name.removesuffix(".scales") for name in read_all(folder) if name.endswith(".scales")]
    forms = {path: config.get(path, default) for path in paths}
    return {path: (f["bits"], f["group_size"], f["mode"]) for path, f in forms.items()}


# --- rules


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("self_attn.o_proj", "model.layers.3.self_attn.o_proj", True),
        ("o_proj", "model.layers.3.self_attn.o_proj", True),
        ("_proj", "model.layers.3.self_attn.o_proj", False),
        ("*_proj", "model.layers.3.self_attn.o_proj", True),
        ("mlp.switch_mlp.*", "model.layers.3.mlp.switch_mlp.up_proj", True),
        ("mlp.*", "model.layers.3.mlp.switch_mlp.up_proj", True),
        ("model.layers.1.*", "model.layers.1.mlp.gate", True),
        ("model.layers.1.*", "model.layers.10.mlp.gate", False),
        ("lm_head", "lm_head", True),
    ],
)
def test_patterns_name_a_path_or_its_end(pattern, path, matches):
    assert Rule.parse(f"{pattern}=4,64").matches(path) is matches


@pytest.mark.parametrize(
    "text", ["x", "=4,64", "x=", "x=4", "x=4,64,affine,1", "x=four,64", "x=4,64,gguf", "x=7,64",
             "x=4,48", "x=8,32,mxfp4", "x=4,16"],
)  # fmt: skip
def test_rules_that_cannot_be_read_are_refused(text, tmp_path):
    with pytest.raises(UserError, match=re.escape(text)):
        convert(tmp_path / "nowhere", tmp_path / "out", q_rules=[text])


def test_rules_alone_quantise_what_they_name_and_nothing_else(source, tmp_path):
    report = convert(source, tmp_path / "out", q_rules=RULES)
    found = packings(tmp_path / "out")
    assert len(found) == 3 * 3 + 4
    for path, form in found.items():
        wanted = (8, 64, "affine") if path.endswith("o_proj") else (4, 32, "affine")
        assert form == wanted, path
    assert report.recipe["rules"] == RULES
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["mlx_kda"]["recipe"] == report.recipe
    assert "--q-rule 'mlp.switch_mlp.*=4,32'" in (tmp_path / "out" / "README.md").read_text()


def test_rules_go_before_the_default_and_later_ones_before_earlier(source, tmp_path):
    rules = [
        "self_attn.*=8,32",
        "o_proj=6,64",
        "model.layers.0.self_attn.o_proj=keep",
        "mlp.gate=4,32",
        "embed_tokens=4,32,mxfp4",
    ]
    convert(source, tmp_path / "out", q_bits=3, q_group_size=32, q_rules=rules)
    found = packings(tmp_path / "out")
    assert "model.layers.0.self_attn.o_proj" not in found
    assert found["model.layers.1.self_attn.o_proj"] == (6, 64, "affine")
    # a rule reaches the gate path, which the default spares
    assert found["model.layers.1.self_attn.b_proj"] == (8, 32, "affine")
    assert found["model.layers.1.mlp.gate"] == (4, 32, "affine")
    assert found["model.embed_tokens"] == (4, 32, "mxfp4")
    assert found["lm_head"] == (3, 32, "affine")
    # what may never be packed is not, whatever a rule says
    assert not [p for p in found if p.endswith(("_conv.conv", "A_log", "dt_bias", "norm"))]


def test_rules_for_nothing_are_refused(source, tmp_path):
    for rules, word in (
        (["frob=4,64"], "frob=4,64"),
        (["self_attn.q_conv.conv=4,32"], "q_conv"),
        (["A_log=4,32"], "A_log"),
        (["o_proj=4,64", "self_attn.*=keep"], "o_proj=4,64"),
        (["mlp.switch_mlp.down_proj=4,64"], "32 wide"),
    ):
        with pytest.raises(UserError, match=word):
            convert(source, tmp_path / "out", q_rules=rules)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        {"q_rules": RULES},
        {"q_bits": 4, "q_group_size": 32, "q_rules": ["lm_head=keep", "o_proj=4,16,nvfp4"]},
        {"q_bits": 4, "q_mode": "mxfp4", "q_rules": ["self_attn.*=8,32,mxfp8"]},
        {"target_bpw": 6},
        {"target_bpw": 12, "q_group_size": 32},
        {"dtype": "bf16"},
        {"dtype": "fp16"},
        {"dtype": "fp32"},
    ],
    ids=str,
)
def test_stock_mlx_lm_loads_every_recipe(source, tmp_path, options):
    """Mixed packings too: the same logits in stock mlx-lm and here."""
    report = convert(source, tmp_path / "out", **options)
    if "dtype" in options:  # MLX's CPU has no 16-bit experts
        names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        assert report.dtype == names[options["dtype"]]
        truth = stock_logits(tmp_path / "out", TOKENS, mx.float32)
        model = load_model(tmp_path / "out")
        model.set_dtype(mx.float32)
        ours = model(TOKENS)
    else:
        truth, ours = stock_logits(tmp_path / "out", TOKENS), load_model(tmp_path / "out")(TOKENS)
    assert mx.abs(ours - truth).max().item() <= STOCK * mx.abs(truth).max().item()


@pytest.mark.parametrize(
    ("options", "headline"),
    [
        ({"q_rules": ["o_proj=8,64"]}, "8 bits (affine, groups of 64) where the rules apply"),
        (
            {"q_rules": ["o_proj=8,64", "mlp.switch_mlp.*=4,32"]},
            "4 and 8 bits where the rules apply",
        ),
        (
            {"q_bits": 4, "q_group_size": 32, "q_rules": ["o_proj=8,64"]},
            "4 bits (affine, groups of 32), with rules",
        ),
        (
            {"target_bpw": 8, "q_rules": ["o_proj=8,64"]},
            "mixed bits averaging 8 per weight, with rules",
        ),
        ({"target_bpw": 8}, "mixed bits averaging 8 per weight"),
        ({"q_bits": 8, "q_mode": "mxfp8"}, "8 bits (mxfp8, groups of 32)"),
    ],
    ids=str,
)
def test_the_headline_says_what_was_asked(source, tmp_path, options, headline):
    """By rules alone it used to claim that all weights have the bits of the commonest."""
    report = convert(source, tmp_path / "out", **options)
    assert report.how() == f"{headline}, rest float32"
    for page in ("README.md", "conversion.txt"):
        assert report.how() in (tmp_path / "out" / page).read_text()


# --- byte budgets


@pytest.mark.parametrize("target", [6, 7.5, 9, 14])
def test_a_budget_is_kept_and_used(source, tmp_path, target):
    report = convert(source, tmp_path / "out", target_bpw=target)
    assert target * 0.97 < report.bits_per_weight <= target
    assert report.recipe["target_bpw"] == target


def test_bytes_go_where_the_error_is(tmp_path):
    """One layer's experts have two values only, which few bits hold exactly: they get no more."""
    tensors = weights()
    for name in tensors:
        if re.search(r"layers\.2\.block_sparse_moe\.experts\.\d\.w1", name):
            tensors[name] = mx.sign(tensors[name]) * 0.125
    source = write_checkpoint(tmp_path / "source", tensors=tensors)
    convert(source, tmp_path / "out", target_bpw=8)
    found = packings(tmp_path / "out")
    bits = [found[f"model.layers.{i}.mlp.switch_mlp.gate_proj"][0] for i in (1, 2, 3)]
    assert bits[1] < min(bits[0], bits[2])


def test_no_other_choice_of_as_many_bytes_has_less_error():
    """Against every choice there is, wherever no step was passed over for its size."""
    draw, compared = random.Random(3), 0
    packings = [Quantization(bits, 64) for bits in (2, 3, 4, 8)]
    gain = lambda a, b: (a[1] - b[1]) / (b[0] - a[0])  # noqa: E731
    for _ in range(6):
        points = {}
        for path in "abcd":
            size, error = draw.randint(1, 9), draw.uniform(0.5, 2)
            hull = [(size * p.bits, error * 4.0**-p.bits, p) for p in packings]
            points[path] = [*hull, (size * 16, 0.0, None)]
        for budget in range(sum(hull[0][0] for hull in points.values()), 300):
            chosen = allot(points, budget)
            at = {path: [p[2] for p in points[path]].index(chosen[path]) for path in points}
            taken = [gain(h[at[p] - 1], h[at[p]]) for p, h in points.items() if at[p]]
            left = [gain(h[at[p]], h[at[p] + 1]) for p, h in points.items() if at[p] < 4]
            if taken and left and max(left) > min(taken):
                continue
            used = [points[path][place] for path, place in at.items()]
            nbytes = sum(p[0] for p in used)
            assert nbytes <= budget
            every = itertools.product(*points.values())
            best = min(sum(p[1] for p in c) for c in every if sum(p[0] for p in c) <= nbytes)
            assert sum(p[1] for p in used) == pytest.approx(best, abs=1e-12)
            compared += 1
    assert compared > 60


def test_a_budget_spares_convolutions_rules_and_the_router(source, tmp_path):
    """The gate path takes part: its 16 bits were worth more elsewhere at every size measured."""
    rules = ["lm_head=8,32", "layers.1.self_attn.f_a_proj=keep"]
    convert(source, tmp_path / "out", target_bpw=6, q_rules=rules)
    found = packings(tmp_path / "out")
    assert not [path for path in found if path.endswith("conv")]
    assert found["lm_head"] == (8, 32, "affine")
    assert found["model.layers.1.mlp.gate"] == (8, 64, "affine")
    assert "model.layers.1.self_attn.f_a_proj" not in found
    assert "model.layers.0.self_attn.f_a_proj" in found


def test_sensitivities_are_in_the_order_that_was_measured():
    """Embedding and head were valued like any projection: 4.95 bits were worse than 4 uniform."""
    layer = "model.layers.5."
    order = [
        "model.embed_tokens",
        "lm_head",
        "model.layers.0.mlp.down_proj",
        layer + "self_attn.o_proj",
        layer + "mlp.switch_mlp.up_proj",
        layer + "self_attn.q_proj",
        layer + "self_attn.g_b_proj",
    ]
    values = [sensitivity(path) for path in order]
    assert values == sorted(values, reverse=True) and len(set(values)) == len(values)
    assert sensitivity("model.layers.0.self_attn.q_proj") == 3 * sensitivity(order[5])
    assert sensitivity(order[0], tied=True) == values[0] + values[1]
    assert sensitivity("model.layers.10.self_attn.q_proj") == sensitivity(order[5])


def test_budgets_that_cannot_be_kept(source, tmp_path):
    for options, word in (
        ({"target_bpw": 3}, "the least possible is"),
        ({"target_bpw": 1}, "between 2 and 16"),
        ({"target_bpw": 17}, "between 2 and 16"),
        ({"target_bpw": 5, "q_bits": 4}, "--q-bits"),
        ({"target_bpw": 5, "q_mode": "mxfp4"}, "--q-mode"),
    ):
        with pytest.raises(UserError, match=word):
            convert(source, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()


def test_a_budget_below_the_least_is_refused_before_anything_is_read(source, tmp_path, monkeypatch):
    """All weights used to be measured first, a plan did not refuse it, and the least was too low.

    The least that is named can be had.
    """
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr("mlx_kda.convert.bit_budget.measure", lambda *args: pytest.fail("measured"))
        for command in (plan, convert):
            with pytest.raises(UserError, match="--target-bpw 2.5 is too low") as refusal:
                command(source, out, target_bpw=2.5)
            assert list(tmp_path.iterdir()) == []
    least = float(str(refusal.value).rpartition(" ")[2])
    with pytest.raises(UserError, match="the least possible is"):
        plan(source, out, target_bpw=least - 0.001)
    assert convert(source, out, target_bpw=least).bits_per_weight == pytest.approx(least, abs=0.001)


def test_allot_takes_the_steepest_steps_first():
    small, large = Quantization(2, 64), Quantization(8, 64)
    points = {
        "steep": [(10, 1.0, small), (20, 0.0, large)],
        "flat": [(10, 1.0, small), (20, 0.9, large)],
        "heavy": [(10, 1.0, small), (1000, 0.0, large)],
    }
    assert allot(points, 40) == {"steep": large, "flat": small, "heavy": small}
    assert allot(points, 50) == {"steep": large, "flat": large, "heavy": small}
    assert set(allot(points, 30).values()) == {small}


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_error_of_a_weight_in_slices(monkeypatch, bits):
    weight = mx.random.normal((50, 3, 64), key=mx.random.key(bits)).astype(mx.bfloat16)
    how = {"bits": bits, "group_size": 64}
    back = mx.dequantize(*mx.quantize(weight, **how), **how)
    wide = weight.astype(mx.float32)
    truth = ((back.astype(mx.float32) - wide).square().sum() / wide.square().sum()).item()
    monkeypatch.setattr("mlx_kda.convert.bit_budget.SLICE", 64 * 7)
    pieces = [weight[:13], weight[13:14], weight[14:]]
    found = errors_of(pieces, [Quantization(bits, 64), Quantization(bits, 32)])
    assert found[0] == pytest.approx(truth, rel=1e-4) and found[1] < found[0]
    assert errors_of([mx.zeros((4, 64))], [Quantization(bits, 64)]) == [0]


def test_a_budget_measures_stacked_experts_in_pieces(source, tmp_path):
    """A stack used to be made whole, 1.2 GB for the 48B, which no plan had counted."""

    def whole(read):
        raise AssertionError("made whole")

    found = []
    for name in ("a", "b"):
        plan = plan_conversion(open_source(source), ConvertOptions(target_bpw=7))
        if name == "b":
            plan.mapping.steps = [
                replace(step, run=whole) if step.pieces else step for step in plan.mapping.steps
            ]
        (tmp_path / name).mkdir()
        found.append(measure(BitBudget(plan), ResumeState(tmp_path / name), None))
    assert found[0] == found[1]
    assert sum("switch_mlp" in path for path in found[0]) == 9


# --- plans


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"q_bits": 4, "q_group_size": 32},
        {"q_bits": 4, "q_mode": "nvfp4"},
        {"q_rules": ["o_proj=8,64"]},
    ],
    ids=str,
)
def test_a_plan_says_what_is_then_written(source, tmp_path, options):
    options |= {"shard_bytes": 100_000}
    found = plan(source, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())
    report = convert(source, tmp_path / "out", **options)
    assert found.bytes_out == report.bytes_out and found.bytes_in == report.bytes_in
    assert found.families == report.families and found.bits == report.bits
    assert found.files == len(report.files)
    assert found.bits_per_weight == report.bits_per_weight
    assert found.layers == {"kda": 3, "mla": 1}
    assert sum(f["bytes"] for f in found.source_families.values()) == found.bytes_in
    assert set(found.running) == {"8K", "128K", "1M"}


def test_a_plan_for_a_budget(source, tmp_path):
    """Its families used to be printed as zeros; now by the fewest bits, and what is settled."""
    found = plan(source, tmp_path / "out", target_bpw=8)
    assert found.bits_per_weight == pytest.approx(8, rel=1e-4)
    report = convert(source, tmp_path / "out", target_bpw=8)
    assert found.families.keys() == report.families.keys() == found.source_families.keys()
    assert {"experts", "embedding", "head"} <= set(found.open)
    for family, sums in found.families.items():
        least, made = sums["bytes"], report.families[family]["bytes"]
        assert 0 < least <= made and (family in found.open or least == made), family
        assert (family in found.bits) <= (family not in found.open)
    lines = {line.split("  ")[1]: line for line in found.lines() if line.startswith("  ")}
    assert ">=" in lines["experts"] and "measured errors" in lines["experts"]
    assert ">=" not in lines["norms"] and "0 B" not in "".join(lines.values())


def test_running_memory_is_that_of_the_plan_command(tmp_path, capsys):
    """`convert --plan` and, of what it made, `plan`: the same numbers."""
    source = write_checkpoint(tmp_path / "source", model_max_length=1 << 20)
    convert(source, tmp_path / "out")
    found = plan(source, tmp_path / "other")
    assert main(["plan", str(tmp_path / "out"), "--context", "131072", "--json"]) == 0
    theirs = json.loads(capsys.readouterr().out)
    text = json.dumps(theirs)
    sizes = found.running["128K"]["exact"]
    for key in ("states", "latents", "working"):
        assert str(sizes[key]) in text


def test_the_plan_command(source, tmp_path, capsys, monkeypatch):
    out = str(tmp_path / "out")
    assert main(["convert", str(source), out, "--plan", "--q-bits", "4"]) == 0
    text = capsys.readouterr().out
    for word in ("3 KDA, 1 MLA", "bits per weight", "peak memory", "free", "8K", "128K", "1M"):
        assert word in text
    assert main(["convert", str(source), out, "--plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_weight"] == 32

    class Usage:
        free = 1000

    monkeypatch.setattr("mlx_kda.convert.output_dir.shutil.disk_usage", lambda path: Usage)
    assert main(["convert", str(source), out, "--plan"]) == 2
    shown, err = capsys.readouterr()
    assert "peak memory" in shown and "1 KB free" in err and err.count("\n") == 1
    monkeypatch.setattr("mlx_kda.convert.conversion_plan.IDLE_BYTES", 10**18)
    assert main(["convert", str(source), out, "--plan"]) == 2
    assert "of memory, this machine has" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr("mlx_kda.convert.conversion_plan.IDLE_BYTES", 10**18)
    assert main(["convert", str(source), out]) == 2
    assert "of memory, this machine has" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "size"),
    [("100000", 10**5), ("2.5M", 2_500_000), ("5gb", 5 * 10**9), ("2T", 2 * 10**12)],
)
def test_shard_sizes_in_words(source, tmp_path, capsys, text, size):
    from mlx_kda.cli.convert import byte_size

    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["0", "-1", "big", "5X", ""])
def test_shard_sizes_that_are_none(source, tmp_path, capsys, text):
    with pytest.raises(SystemExit) as caught:
        main(["convert", str(source), str(tmp_path / "out"), f"--shard-size={text}"])
    assert caught.value.code == 2 and "not a size" in capsys.readouterr().err
