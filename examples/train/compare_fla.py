"""Compare an exported pure KDA folder with FLA's own KDAForCausalLM, on a CUDA machine.

    python compare_fla.py --folder ../tiny-fla-kda

Both run in bfloat16 on the same kernels; prints the difference of the logits on one chat.
"""

import argparse
import sys
from pathlib import Path

import torch
from chat import SentencePieceTokenizer
from kernels import few_configurations
from model import Model, pure_kda
from safetensors.torch import load_file


@torch.inference_mode()
def main() -> None:
    """Exit with 1 unless the two agree."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    few_configurations()
    from export import FLA_NAMES
    from fla.models import KDAForCausalLM

    tokenizer = SentencePieceTokenizer(folder / "tokenizer.model")
    ours = Model(pure_kda(tokenizer.size))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for mine, theirs in FLA_NAMES:
            name = name.replace(f".{theirs}.", f".{mine}.")
        tensors[name] = tensor.view(1, 1, -1, 1) if name.endswith("A_log") else tensor
    ours.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    ours.cuda().eval()
    theirs, report = KDAForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    print("loading:", {k: sorted(v) for k, v in report.items() if v})
    theirs.cuda().eval()
    text = [("user", "What is an anchor?"), ("assistant", "A mechanical device. " * 20)]
    ids = torch.tensor([tokenizer.prompt(text)]).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        a = ours(ids).float()
    b = theirs(ids).logits.float()
    off = ((a - b).norm() / a.norm()).item()
    same = (a.argmax(-1) == b.argmax(-1)).float().mean().item()
    print(f"{ids.shape[1]} tokens: relative difference {off:.2e}, same arg max {same:.3f}")
    sys.exit(off > 0.05)


if __name__ == "__main__":
    main()
