"""Compare an exported folder with transformers' own Kimi Linear, on the CPU.

    python compare.py --folder ../tiny-kimi-linear --save ../../tests/tiny_checkpoint_golden.npz

Loads the files with transformers (5.24 or later, no remote code) and with model.py, both in
float32, and prints the largest difference of the logits on a chat and on running text. With
--save, keeps transformers' logits of the last tokens for the tests, which have no PyTorch.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from chat import Tokenizer
from model import Config, Model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def from_hub(folder: Path, vocab: int) -> Model:
    """model.py's model with the weights of an exported folder."""
    model = Model(Config(vocab=vocab))
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    experts = model.config.experts
    for name in list(model.state_dict()):
        if name.rsplit(".", 1)[-1] in ("w1", "w2", "w3"):
            stem, which = name.rsplit(".", 1)
            parts = [tensors.pop(f"{stem}.{n}.{which}.weight") for n in range(experts)]
            tensors[name] = torch.stack(parts)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.eval()


@torch.inference_mode()
def main() -> None:
    """Exit with 1 unless the two agree."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--save", type=Path, help="file for transformers' logits (.npz)")
    args = parser.parse_args()
    tokenizer = Tokenizer(args.folder / "tiktoken.model")
    ours = from_hub(args.folder, tokenizer.size)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=torch.float32, output_loading_info=True
    )
    print("loading:", {k: sorted(v) for k, v in report.items() if v})
    theirs.eval()
    agree, kept = True, {}
    prompts = [
        tokenizer.prompt([("user", "What is an anchor?")]),
        tokenizer.encode("In the beginning God created the heaven and the earth. " * 12),
    ]
    for number, ids in enumerate(prompts):
        batch = torch.tensor([ids])
        a, b = ours(batch), theirs(batch).logits
        difference = ((a - b).abs().max() / a.abs().max()).item()
        same = (a.argmax(-1) == b.argmax(-1)).float().mean().item()
        print(f"{len(ids)} tokens: largest difference {difference:.2e}, same arg max {same:.3f}")
        agree = agree and difference <= 1e-4
        kept[f"tokens_{number}"] = np.array(ids, dtype=np.int32)
        kept[f"logits_{number}"] = b[0, -4:].numpy()
    if args.save:
        np.savez_compressed(args.save, **kept)
    sys.exit(not agree)


if __name__ == "__main__":
    main()
