"""Statistics, caches and kernels as lines of text."""

from typing import TYPE_CHECKING, Any

from ..format import size

if TYPE_CHECKING:
    from ..cache.policy import LayerReport
    from ..generate import Statistics

_ENDS = {
    "stop": "an end token",
    "length": "--max-tokens or the end of the context",
    "interrupted": "a signal",
}


def describe(statistics: "Statistics") -> list[str]:
    """The statistics of one generation."""
    s = statistics
    reused = f", {s.reused_tokens:,} reused" if s.reused_tokens else ""
    by = "MLX" if s.peak_memory_source == "mlx" else "the whole process"
    drafted = (
        [f"speculation: {s.accepted_tokens:,} of {s.drafted_tokens:,} drafted tokens were accepted"]
        if s.drafted_tokens
        else []
    )
    return [
        f"prompt: {s.prefilled_tokens:,} tokens prefilled, {s.prompt_tps:.1f} tokens/s{reused}",
        f"answer: {s.generation_tokens:,} tokens generated, {s.generation_tps:.1f} tokens/s"
        + (f", stopped by {_ENDS[s.finish_reason]}" if s.finish_reason else ""),
        *drafted,
        f"cache: {size(s.cache_bytes)}, policy {s.policy}",
        f"peak memory: {size(s.peak_memory)} ({by})",
    ]


def describe_layers(layers: "list[LayerReport]", tokens: int) -> list[str]:
    """What each layer's cache keeps, with layers that are alike on one line."""
    groups: dict[tuple, list[LayerReport]] = {}
    for layer in layers:
        groups.setdefault((layer.kind, layer.in_force, layer.asked), []).append(layer)
    lines = []
    for (kind, in_force, asked), same in groups.items():
        numbers = _ranges([layer.index for layer in same])
        asked_for = f" (policy {asked})" if kind == "mla" else ""
        at = sum(layer.bytes_at(tokens) for layer in same)
        now = [layer.now for layer in same if layer.now is not None]
        allocated = f", {size(sum(now))} allocated now" if now else ""
        lines.append(
            f"{kind.upper()} layers {numbers}: {in_force}{asked_for}: "
            f"{size(at)} at {tokens:,} tokens{allocated}"
        )
    return lines


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers with runs shortened, as in 0-2, 4-6."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    return ", ".join("-".join(map(str, run)) for run in runs)


def kda_paths(config: Any, dtype: str, prompt: int | None = None) -> dict[str, str]:
    """What runs a model's KDA layers on this machine for one sequence, and why.

    By "prefill" (of ``prompt`` tokens, by default a step) and "decode"; ``config`` is the model's,
    ``dtype`` what it computes in.
    """
    import mlx.core as mx

    from ..attention import resolve
    from ..layers.mix import choose
    from ..step import prefill_step

    _, Dv, Dk = config.linear_state_shape
    runner, why = resolve()
    paths = {}
    for name, T in (("prefill", prompt or prefill_step()), ("decode", 1)):
        call = choose(T, Dk, Dv, config.linear_conv_kernel_dim, getattr(mx, dtype), runner)
        paths[name] = f"{call} ({why})" if runner == "ops" else str(call)
    return paths
