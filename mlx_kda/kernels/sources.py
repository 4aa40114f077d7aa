"""The kernels' sources and signatures, and which file needs which header."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ..runners import MetalKernel, metal_kernel

_CONV = (
    *("q", "k", "v", "q_window", "k_window", "v_window"),
    *("q_conv_weight", "k_conv_weight", "v_conv_weight"),
)
_WINDOWS_OUT = ("q_window_out", "k_window_out", "v_window_out")
_DECAY = ("g", "A_log", "dt_bias", "beta")


@dataclass(frozen=True)
class Source:
    """A file of metal/ as `metal_kernel` wants it."""

    name: str
    headers: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def body(self) -> str:
        return _text(f"{self.name}.metal")

    @property
    def header(self) -> str:
        return "".join(_text(name) for name in self.headers)


SOURCES = {
    source.name: source
    for source in (
        Source(
            "kda_decode",
            ("kda_common.h", "kda_conv.h"),
            (*_CONV, *_DECAY, "z", "weight", "state", "lengths", "dims", "params"),
            ("y", "state_out", *_WINDOWS_OUT),
        ),
        Source(
            "kda_prologue",
            ("kda_common.h", "kda_conv.h"),
            (*_CONV, "lengths", "dims"),
            ("q_out", "k_out", "v_out", *_WINDOWS_OUT),
        ),
        Source(
            "kda_recurrent",
            ("kda_common.h",),
            ("q", "k", "v", *_DECAY, "state", "lengths", "dims", "params"),
            ("o", "state_out"),
        ),
        Source(
            "kda_chunk_prepare",
            ("kda_common.h", "kda_chunk.h"),
            ("q", "k", *_DECAY, "lengths", "dims", "params"),
            ("kq", "kh", "tri", "decay"),
        ),
        Source(
            "kda_chunk_scan",
            ("kda_common.h", "kda_chunk.h"),
            ("kq", "kh", "tri", "decay", "v", "state", "lengths", "dims"),
            ("o", "state_out"),
        ),
        Source(
            "kda_epilogue",
            ("kda_common.h",),
            ("o", "z", "weight", "lengths", "dims", "params"),
            ("y",),
        ),
    )
}

MOE_SOURCES = {
    "moe_route": Source(
        "moe_route", ("kda_common.h",), ("logits", "bias", "params"), ("chosen", "weights")
    )
}


@cache
def _text(name: str) -> str:
    return (files("mlx_kda") / "metal" / name).read_text(encoding="ascii")


@cache
def kernel(name: str, runner: str) -> MetalKernel:
    """The kernel as a callable with the signature of `mx.fast.metal_kernel`'s result."""
    source = (SOURCES | MOE_SOURCES)[name]
    return metal_kernel(
        name=name,
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        source=source.body,
        header=source.header,
        runner=runner,
    )
