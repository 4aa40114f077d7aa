"""The options of a conversion, and the recipe they make: which weights are quantised, and how.

The default recipe quantises every matrix except the gate path and the convolutions. On the small
trained model 8 bits would be enough for the gates (docs/quality.md); in a large model they are
less than 1 % of the bytes, and what their errors do over a very long context was not measured.
The router gets 8 affine bits or more. A rule for a weight takes precedence over all of this.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ..errors import UserError
from ..models.tensor_roles import CONVOLUTION, GATE_PATH, ROUTER, ROUTER_QUANTIZATION
from ..weights.quantization import Quantization, config_entry
from ..weights.safetensors import DTYPE_WORDS, FLOATS, Spec

RULE = re.compile(r"(.+)=(?:keep|\s*(\d+)\s*,\s*(\d+)\s*(?:,\s*(\w+)\s*)?)")


@dataclass(frozen=True)
class Rule:
    """A packing, or None to leave the weight unquantised, for every path that a pattern matches.

    The pattern is a path or the end of one, with ``*`` as wildcard: "self_attn.o_proj",
    "model.layers.3.*".
    """

    text: str
    pattern: str
    packing: Quantization | None

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Read PATTERN=BITS,GROUP[,MODE] or PATTERN=keep; UserError if it is neither."""
        if (found := RULE.fullmatch(text)) is None:
            raise UserError(f"--q-rule {text}: write PATTERN=BITS,GROUP[,MODE] or PATTERN=keep")
        pattern, bits, group, mode = found.groups()
        if bits is None:
            return cls(text, pattern, None)
        packing = Quantization.make(int(bits), int(group), mode or "affine", f"--q-rule {text}:")
        return cls(text, pattern, packing)

    def matches(self, path: str) -> bool:
        """Whether the rule is for this weight."""
        return fnmatchcase(path, self.pattern) or fnmatchcase(path, f"*.{self.pattern}")


@dataclass
class Recipe:
    """Chooses the packing of each weight, and records what it left unquantised and why."""

    default: Quantization | None
    rules: tuple[Rule, ...] = ()
    target_bpw: float | None = None
    # what a byte budget gave each weight; None leaves it unquantised
    chosen: dict[str, Quantization | None] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    packed: dict[str, Quantization] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def choose(self, name: str, spec: Spec) -> Quantization | None:
        """The packing of one tensor, or None if it is not quantised."""
        if not _is_matrix(name, spec):
            return None
        path = name.removesuffix(".weight")
        packing, reason = self._decide(path, spec.shape[-1])
        if packing is not None:
            self.packed[path] = packing
        elif reason:
            self.kept[path] = reason
        return packing

    def _decide(self, path: str, width: int) -> tuple[Quantization | None, str]:
        """The packing of a matrix, or None and the reason that the report gives."""
        if CONVOLUTION.search(path):
            return None, "convolution window"
        if (rule := self._rule(path)) is not None:
            self.used.add(rule.text)
            if rule.packing is None:
                return None, "by a rule"
            if not rule.packing.fits(width):
                raise UserError(
                    f"--q-rule {rule.text}: {path} is {width} wide, not a multiple of "
                    f"{rule.packing.group_size}"
                )
            return rule.packing, ""
        packing = self.default
        if packing is None:  # rules only: everything else stays as it is
            return None, ""
        if path in self.chosen:
            chosen = self.chosen[path]
            if chosen is None:
                return None, "within the budget"
            packing = chosen
        elif GATE_PATH.search(path):
            return None, "gate path"
        elif ROUTER.search(path) and (packing.bits < 8 or packing.mode != "affine"):
            packing = ROUTER_QUANTIZATION
        if not packing.fits(width):
            return None, f"width {width} is not a multiple of group {packing.group_size}"
        return packing, ""

    def is_free(self, name: str, spec: Spec) -> bool:
        """Whether a byte budget may choose the bits of this tensor."""
        path = name.removesuffix(".weight")
        fixed = ROUTER.search(path) or CONVOLUTION.search(path) or self._rule(path)
        return _is_matrix(name, spec) and not fixed

    def check_rules(self) -> None:
        """Raise UserError for a rule that applied to no weight: its pattern is mistyped."""
        for rule in self.rules:
            if rule.text not in self.used:
                raise UserError(
                    f"--q-rule {rule.text} matches no weight that can be quantised, or a later "
                    "rule overrides it; names look like model.layers.0.self_attn.o_proj"
                )

    def as_config(self) -> dict:
        """The ``quantization`` entry of config.json: a default and the weights that differ."""
        return config_entry(self.packed, None if self.chosen else self.default)

    def describe(self) -> dict:
        """The options that made the recipe, for JSON."""
        return {
            "default": self.default.as_config() if self.default and not self.target_bpw else None,
            "rules": [rule.text for rule in self.rules],
            "target_bpw": self.target_bpw,
            "group_size": self.default.group_size if self.default else None,
        }

    def _rule(self, path: str) -> Rule | None:
        """The last rule that matches."""
        return next((rule for rule in reversed(self.rules) if rule.matches(path)), None)


def _is_matrix(name: str, spec: Spec) -> bool:
    return name.endswith(".weight") and len(spec.shape) >= 2 and spec.dtype in FLOATS


@dataclass(frozen=True)
class ConvertOptions:
    """What the user asks of a conversion, named like the arguments of ``convert``.

    Raises UserError where MLX does not have what is asked for, or options exclude each other.
    """

    dtype: str | None = None
    q_bits: int | None = None
    q_group_size: int | None = None
    q_mode: str = "affine"
    q_rules: Sequence[str] = ()
    target_bpw: float | None = None
    dequantize: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPE_WORDS:
            raise UserError(
                f"--dtype {self.dtype} is not known: choose float32, float16 or bfloat16"
            )
        self.recipe()

    def recipe(self) -> Recipe | None:
        """A new recipe; None if nothing is to be quantised."""
        rules = tuple(Rule.parse(rule) for rule in self.q_rules)
        default: Quantization | None
        default = Quantization.make(self.q_bits, self.q_group_size, self.q_mode, "--q-mode")
        if self.target_bpw is not None:
            if self.q_bits is not None or self.q_mode != "affine":
                raise UserError(
                    "--target-bpw chooses the bits itself: leave out --q-bits, --q-mode"
                )
            if not 2 <= self.target_bpw <= 16:
                raise UserError(f"--target-bpw must lie between 2 and 16, got {self.target_bpw:g}")
        elif self.q_bits is None and self.q_group_size is None and self.q_mode == "affine":
            if not rules:
                return None
            default = None
        return Recipe(default, rules, self.target_bpw)

    def as_command(self) -> str:
        """The options as they are written after ``mlx-kda convert SRC OUT``."""
        values = {
            "--dtype": self.dtype,
            "--q-bits": self.q_bits,
            "--q-group-size": self.q_group_size,
            "--q-mode": None if self.q_mode == "affine" else self.q_mode,
            "--target-bpw": self.target_bpw,
        }
        words = [
            f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"
            for flag, value in values.items()
            if value is not None
        ]
        words += [f"--q-rule {shlex.quote(rule)}" for rule in self.q_rules]
        return " ".join(words + (["--dequantize"] if self.dequantize else []))
