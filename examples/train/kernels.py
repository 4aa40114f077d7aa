"""Keep Triton's autotuning short.

FLA's kernels are tuned over hundreds of configurations, minutes of compilation that a piece of
under ten minutes cannot spend. One warp count and one pipeline depth are kept, with every block
size: at this model's size that is within a few per cent, and it compiles in well under a minute.
"""


def few_configurations() -> None:
    """Make Triton's autotuner drop most configurations. Call before importing fla."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def fewer(configs: list) -> list:
        if not configs:
            return configs
        warps = min((c.num_warps for c in configs), key=lambda n: abs(n - 4))
        kept = [c for c in configs if c.num_warps == warps]
        stages = min(c.num_stages for c in kept)
        return [c for c in kept if c.num_stages == stages]

    def init(self, fn, arg_names, configs, *rest, **named):
        original(self, fn, arg_names, fewer(configs), *rest, **named)

    Autotuner.__init__ = init
