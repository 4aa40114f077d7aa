"""Which weights are stored in few bits, and how: the recipe of a conversion.

Default recipe: every matrix is quantised but those that steer the gates and the convolutions. On
the small trained model 8 bits would do for the gates (docs/quality.md); of a large model they are
less than 1 % of the bytes, and what their errors do along a very long text nobody has measured
there. The router has 8 affine bits, or more of them. A rule that the user gives for a weight goes
before all that.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ..errors import UserError
from ..models.tensor_roles import CONVOLUTION, GATE_PATH, ROUTER, ROUTER_QUANTIZATION
from ..weights.quantization import Quantization
from ..weights.safetensors import FLOATS, Spec

KEEP = "keep"


@dataclass(frozen=True)
class Rule:
    """A packing, or None to keep the weight, for every path that a pattern matches.

    The pattern is a path or its end, with `*`: "self_attn.o_proj", "model.layers.3.*".
    """

    text: str
    pattern: str
    packing: Quantization | None

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Read PATTERN=BITS,GROUP[,MODE] or PATTERN=keep; UserError if it is neither."""
        pattern, found, how = text.rpartition("=")
        parts = how.split(",")
        if not found or not pattern or not how:
            raise UserError(f"--q-rule {text}: write PATTERN=BITS,GROUP[,MODE] or PATTERN=keep")
        if how == KEEP:
            return cls(text, pattern, None)
        mode = parts[2].strip() if len(parts) == 3 else "affine"
        try:
            bits, group = (int(part) for part in parts[:2])
        except ValueError:
            bits = group = None
        if bits is None or len(parts) > 3:
            raise UserError(f"--q-rule {text}: write PATTERN=BITS,GROUP[,MODE] or PATTERN=keep")
        return cls(text, pattern, Quantization.make(bits, group, mode, f"--q-rule {text}:"))

    def matches(self, path: str) -> bool:
        """Whether the rule is for this weight."""
        return fnmatchcase(path, self.pattern) or fnmatchcase(path, f"*.{self.pattern}")


@dataclass
class Recipe:
    """Chooses a packing for each weight and remembers what it kept, and why."""

    default: Quantization | None
    rules: tuple[Rule, ...] = ()
    target_bpw: float | None = None
    # what a byte budget gave each weight; None keeps it
    chosen: dict[str, Quantization | None] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    packed: dict[str, Quantization] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    @classmethod
    def make(
        cls,
        bits: int | None,
        group_size: int | None,
        mode: str,
        rules: Sequence[str] = (),
        target_bpw: float | None = None,
    ) -> "Recipe | None":
        """The recipe for `--q-bits`, `--q-group-size`, `--q-mode`, `--q-rule` and `--target-bpw`.

        None if none was asked for. Raises UserError where a mode does not have the bits or the
        group size, a rule cannot be read, or two wishes exclude each other.
        """
        parsed = tuple(Rule.parse(rule) for rule in rules)
        default = Quantization.make(bits, group_size, mode, "--q-mode")
        if target_bpw is not None:
            if bits is not None or mode != "affine":
                raise UserError(
                    "--target-bpw chooses the bits itself: leave out --q-bits, --q-mode"
                )
            if not 2 <= target_bpw <= 16:
                raise UserError(f"--target-bpw must lie between 2 and 16, got {target_bpw:g}")
        elif bits is None and group_size is None and mode == "affine":
            if not parsed:
                return None
            default = None
        return cls(default, parsed, target_bpw)

    def choose(self, name: str, spec: Spec) -> Quantization | None:
        """The packing for one tensor, or None if it stays as it is."""
        path, _, part = name.rpartition(".")
        if part != "weight" or len(spec.shape) < 2 or spec.dtype not in FLOATS:
            return None
        if CONVOLUTION.search(path):
            return self._keep(path, "convolution window")
        width = spec.shape[-1]
        if (rule := self._rule(path)) is not None:
            if rule.packing is None:
                return self._keep(path, "by a rule")
            if not rule.packing.fits(width):
                raise UserError(
                    f"--q-rule {rule.text}: {path} is {width} wide, no multiple of "
                    f"{rule.packing.group_size}"
                )
            return self._pack(path, rule.packing)
        packing = self.default
        if packing is None:  # rules alone: what they do not name stays
            return None
        if path in self.chosen:
            if (packing := self.chosen[path]) is None:
                return self._keep(path, "within the budget")
        elif GATE_PATH.search(path):
            return self._keep(path, "gate path")
        elif ROUTER.search(path) and (packing.bits < 8 or packing.mode != "affine"):
            packing = ROUTER_QUANTIZATION
        if not packing.fits(width):
            return self._keep(path, f"width {width} is no multiple of group {packing.group_size}")
        return self._pack(path, packing)

    def is_free(self, name: str, spec: Spec) -> bool:
        """Whether a byte budget may choose the bits of this tensor."""
        path, _, part = name.rpartition(".")
        plain = part == "weight" and len(spec.shape) >= 2 and spec.dtype in FLOATS
        spared = ROUTER.search(path) or CONVOLUTION.search(path)
        return plain and not spared and self._rule(path) is None

    def check_rules(self) -> None:
        """Refuse a rule that no weight was packed or kept by: its pattern is mistyped."""
        for rule in self.rules:
            if rule.text not in self.used:
                raise UserError(
                    f"--q-rule {rule.text} is for no weight that can be quantised, or a later rule "
                    "took them all; names are like model.layers.0.self_attn.o_proj"
                )

    def as_config(self) -> dict:
        """The `quantization` entry of config.json: a default and the weights that differ."""
        default = self.default
        if default is None or self.chosen:
            default = Counter(self.packed.values()).most_common(1)[0][0]
        differ = {p: v.as_config() for p, v in self.packed.items() if v != default}
        return default.as_config() | differ

    def describe(self) -> dict:
        """What was asked for, as JSON takes it."""
        return {
            "default": self.default.as_config() if self.default and not self.target_bpw else None,
            "rules": [rule.text for rule in self.rules],
            "target_bpw": self.target_bpw,
            "group_size": self.default.group_size if self.default else None,
        }

    def _rule(self, path: str) -> Rule | None:
        """The last rule that matches."""
        return next((rule for rule in reversed(self.rules) if rule.matches(path)), None)

    def _keep(self, path: str, reason: str) -> None:
        self.kept[path] = reason
        self._use(path)

    def _pack(self, path: str, packing: Quantization) -> Quantization:
        self.packed[path] = packing
        self._use(path)
        return packing

    def _use(self, path: str) -> None:
        rule = self._rule(path)
        if rule is not None and not CONVOLUTION.search(path):
            self.used.add(rule.text)
