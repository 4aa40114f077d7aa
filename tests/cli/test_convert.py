"""``mlx-kda convert`` and ``info``: reports, and mistakes that leave nothing behind."""

import json
import shutil

import pytest
from helpers.tiny_checkpoint import CONFIG

from mlx_kda.cli.main import main


@pytest.fixture
def copy(tiny_hf, tmp_path):
    """A copy of the Hugging Face checkpoint, to be damaged."""
    return shutil.copytree(tiny_hf, tmp_path / "hf")


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_conversion_is_reported_and_described_by_info(tiny_hf, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", str(tiny_hf), str(out), "--q-bits", "4", "--q-group-size", "32"]) == 0
    text = capsys.readouterr().out
    assert "4 bits" in text and "bits per weight" in text
    assert json.loads((out / "config.json").read_text())["quantization"]["bits"] == 4
    assert sorted(tmp_path.iterdir()) == [out], "nothing temporary stays"
    assert main(["info", str(out)]) == 0
    text = capsys.readouterr().out
    for words in ("kimi_linear, an MLX folder", "4: 3 KDA, 1 MLA", "512 tokens", "bits 4", "at 1M"):
        assert words in text


def test_json_and_overwrite(tiny_hf, tmp_path, capsys):
    command = ["convert", str(tiny_hf), str(tmp_path / "out"), "--json"]
    assert main(command) == 0
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["dtype"] == "float32" and "exists" in err
    assert main([*command, "--overwrite", "--dtype", "bfloat16"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model_type"] == "kimi_linear" and report["dtype"] == "bfloat16"
    assert report["bytes_out"] < report["bytes_in"] and report["quantization"] is None


def test_quantisation_flags_without_bits(tiny_hf, tmp_path, capsys):
    for flags, hint in (
        (["--q-group-size", "32"], "--q-bits N or --target-bpw X"),
        (["--q-mode", "mxfp8", "--q-bits", "4"], "choose 8"),
    ):
        assert main(["convert", str(tiny_hf), str(tmp_path / "out"), *flags]) == 2
        err = capsys.readouterr().err
        assert hint in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode, bits", [("mxfp4", 4), ("nvfp4", 4), ("mxfp8", 8)])
def test_a_mode_of_one_width_needs_no_bits(tiny_hf, tmp_path, mode, bits):
    assert main(["convert", str(tiny_hf), str(tmp_path / "out"), "--q-mode", mode]) == 0
    packed = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert (packed["mode"], packed["bits"]) == (mode, bits)


@pytest.mark.parametrize("command", ["convert", "plan", "verify"])
def test_a_revision_of_a_local_folder_is_refused(tiny_hf, tiny_mlx, tmp_path, capsys, command):
    arguments = {
        "convert": ["convert", str(tiny_hf), str(tmp_path / "out")],
        "plan": ["convert", str(tiny_hf), str(tmp_path / "out"), "--plan"],
        "verify": ["verify", str(tiny_mlx), "--source", str(tiny_hf)],
    }[command]
    assert main([*arguments, "--revision", "main"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "--revision is for hub ids" in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_info_of_both_forms(tiny_hf, tiny_mlx, capsys):
    reports = []
    for folder in (tiny_hf, tiny_mlx):
        assert main(["info", str(folder), "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    hf, mlx = reports
    assert (hf["format"], mlx["format"]) == ("huggingface", "mlx")
    for report in reports:
        assert report["layer_types"] == {"kda": 3, "mla": 1}
        assert report["context"] == CONFIG["model_max_length"] and report["problem"] is None
        # 3 layers x (2 heads x 32 x 32 state in float32 + 3 windows of 3 x 64 in float32)
        assert report["state_bytes"] == 3 * (2 * 32 * 32 * 4 + 3 * 3 * 64 * 4)
        assert report["latent_bytes_per_token"] == (32 + 32) * 4
        assert report["cache_bytes"]["8K"] == report["state_bytes"] + 8192 * 256
        assert set(report["ops"]) == {"prefill", "decode"} and all(report["ops"].values())
    assert hf["parameters"] == mlx["parameters"] and hf["bits_per_weight"] == 32


@pytest.mark.parametrize(
    "damage",
    [
        {"num_hidden_layers": "two"},
        {"quantization": "4 bits"},
        {"quantization": [4]},
        {"linear_attn_config": 3},
        {"model_type": ["kimi_linear"]},
    ],
    ids=str,
)
def test_a_config_with_a_value_of_a_wrong_kind_is_one_line_everywhere(
    copy, tmp_path, capsys, damage
):
    edit(copy / "config.json", **damage)
    for command in (
        ["info", str(copy)],
        ["plan", str(copy), "--context", "100"],
        ["convert", str(copy), str(tmp_path / "out"), "--dequantize"],
    ):
        assert main(command) == 2, command
        err = capsys.readouterr().err
        assert "config.json" in err or "model_type" in err, command
        assert err.count("\n") == 1 and "--debug" not in err, command
    assert main(["verify", str(copy)]) == 1
    out, err = capsys.readouterr()
    assert "FAIL  config" in out and err == ""


def test_info_describes_what_cannot_run(copy, capsys):
    edit(copy / "config.json", mla_use_nope=False)
    assert main(["info", str(copy)]) == 2
    out, err = capsys.readouterr()
    assert "problem" in out and "mla_use_nope" in out
    assert err.count("\n") == 1 and "cannot run: config.json: mla_use_nope" in err
