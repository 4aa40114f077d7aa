"""A sentencepiece tokenizer.model (llama-style) as a tokenizer of the ``tokenizers`` library."""

import re
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ..errors import CheckpointError
from .tiktoken_model import derive_merges

FILE = "tokenizer.model"
SPACE = "\u2581"
# kinds of pieces in the file
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
UNIGRAM, BPE = 1, 2


def read_model(path: Path) -> Any:
    """Parse the file; CheckpointError if it is damaged or not a sentencepiece model."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made at run time
    try:
        model.ParseFromString(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except DecodeError:
        raise CheckpointError(f"{path} is damaged or not a sentencepiece model") from None
    if not model.pieces:
        raise CheckpointError(f"{path} is damaged or not a sentencepiece model: it has no pieces")
    return model


def build(path: Path, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a sentencepiece model; ``config`` is tokenizer_config.json.

    Raises CheckpointError for a damaged file and for model types other than BPE and unigram.
    """
    proto = read_model(path)
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    pieces = proto.pieces
    # defined by whoever trained it: words that sentencepiece never splits
    words = [piece.piece for piece in pieces if piece.type == USER_DEFINED]
    model: models.Model
    if trainer.model_type == BPE:
        # joined first is the better score, and among equals the earlier piece
        order = sorted(range(len(pieces)), key=lambda i: (-pieces[i].score, i))
        ranks = {pieces[i].piece: n for n, i in enumerate(order) if pieces[i].type == NORMAL}
        model = models.BPE(
            vocab={piece.piece: i for i, piece in enumerate(pieces)},
            merges=derive_merges(ranks),
            unk_token=trainer.unk_piece,
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
            ignore_merges=bool(words),
        )
    elif trainer.model_type == UNIGRAM:
        model = models.Unigram(
            [(piece.piece, piece.score) for piece in pieces],
            unk_id=trainer.unk_id,
            byte_fallback=trainer.byte_fallback,
        )
    else:
        raise CheckpointError(f"{path}: only BPE and unigram sentencepiece models are supported")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(_normalizers(rules))
    if words:
        either = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(either), behavior="isolated")
    tokenizer.decoder = decoders.Sequence(_decoders(rules))
    tokenizer.add_tokens(
        [
            AddedToken(piece.piece, special=True, normalized=False)
            for piece in pieces
            if piece.type in (UNKNOWN, CONTROL)
        ]
    )
    tokenizer.post_processor = _bos_and_eos(proto, config)
    return tokenizer


def _normalizers(rules: Any) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return [*steps, normalizers.Replace(" ", SPACE)]


def _decoders(rules: Any) -> list[decoders.Decoder]:
    steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    return [*steps, decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else steps


def _bos_and_eos(proto: Any, config: dict[str, Any]) -> processors.TemplateProcessing:
    """Adds BOS and EOS as tokenizer_config.json asks (by default BOS alone)."""
    bos, eos = proto.trainer_spec.bos_id, proto.trainer_spec.eos_id
    frame, names = ["$A"], []
    if config.get("add_bos_token", True) and bos >= 0:
        names.append((proto.pieces[bos].piece, bos))
        frame.insert(0, proto.pieces[bos].piece)
    if config.get("add_eos_token", False) and eos >= 0:
        names.append((proto.pieces[eos].piece, eos))
        frame.append(proto.pieces[eos].piece)
    return processors.TemplateProcessing(single=" ".join(frame), special_tokens=names)
