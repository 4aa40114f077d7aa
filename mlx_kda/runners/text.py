"""The Metal text that MLX generates for a call of a custom kernel.

MLX puts its utilities in front of it; what follows them is written here, byte for byte as
``verbose=True`` prints it, so that the emulator compiles what Apple's compiler would get.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Template = Sequence[tuple[str, Any]]
Launcher = Callable[..., list[mx.array]]  # takes the arguments of MLX's call by name

TYPE_NAMES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}

ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

# Fewer elements than this and MLX puts an input into the constant address space.
CONSTANT_BELOW = 8


@dataclass(frozen=True)
class Parameter:
    """One parameter of the generated function.

    ``source`` says where its value comes from: "input", "output", "shape", "strides", "ndim" (of
    input ``index``) or "attribute".
    """

    declaration: str
    source: str
    index: int = 0
    name: str = ""


@dataclass(frozen=True)
class KernelText:
    """The generated text and what is needed to call the function in it."""

    text: str
    function: str  # with its template arguments
    parameters: tuple[Parameter, ...]
    header_lines: int
    source_first: int  # line of the text on which the source begins
    source_lines: int

    def locate(self, line: int) -> dict[str, Any]:
        """Where a line of the text is: ``line`` of the source or ``header_line``, and ``text``."""
        lines = self.text.split("\n")
        if not 0 < line <= len(lines):
            return {}
        where: dict[str, Any] = {"text": lines[line - 1]}
        in_source = line - self.source_first + 1
        if 1 <= in_source <= self.source_lines:
            where["line"] = in_source
        elif line <= self.header_lines:
            where["header_line"] = line
        return where


def template_value(value: Any) -> str:
    """A template argument as MLX writes it: an int, a bool or a dtype."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int):
        return str(value)
    if isinstance(value, mx.Dtype):
        return TYPE_NAMES[value]
    raise ValueError(
        "[metal_kernel] Invalid template argument. Must be `mlx.core.Dtype`, `int` or `bool`."
    )


def _template_kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int) else "typename"


def _input_parameters(
    name: str, array: mx.array, index: int, needs: set[str]
) -> Iterator[Parameter]:
    type_name = TYPE_NAMES[array.dtype]
    if array.ndim == 0:
        yield Parameter(f"const constant {type_name}& {name}", "input", index, name)
    elif array.size < CONSTANT_BELOW:
        yield Parameter(f"const constant {type_name}* {name}", "input", index, name)
    else:
        yield Parameter(f"const device {type_name}* {name}", "input", index, name)
    if array.ndim > 0:
        wanted = {
            "shape": f"const constant int* {name}_shape",
            "strides": f"const constant int64_t* {name}_strides",
            "ndim": f"const constant int& {name}_ndim",
        }
        for what, declaration in wanted.items():
            if what in needs:
                yield Parameter(declaration, what, index, name)


def _mark(array: mx.array) -> str:
    """How an input's kind appears in the function's name."""
    if array.ndim == 0:
        return "s"
    return "c" if array.size < CONSTANT_BELOW else ""


@dataclass(eq=False, repr=False)
class Definition:
    """A kernel as ``mx.fast.metal_kernel`` defines it."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False
    compile_options: dict[str, Any] | None = None

    def generate(
        self,
        inputs: Sequence[Any],
        output_dtypes: Sequence[mx.Dtype],
        template: Template | None = None,
    ) -> KernelText:
        """The Metal text for these inputs, as MLX would print it (without its utilities)."""
        arrays = [as_array(x) for x in inputs]
        template = list(template or ())
        function = self._function_name(arrays, output_dtypes, template)
        parameters = self._parameters(arrays, output_dtypes)
        attributes = [a for a in ATTRIBUTES if a in self.source]

        out = [self.header]
        if template:
            kinds = ", ".join(f"{_template_kind(value)} {key}" for key, value in template)
            out.append(f"template <{kinds}>\n")
        out.append(f"[[kernel]] void {function}(\n")
        outputs_from = len(parameters) - len(self.output_names)
        for index, parameter in enumerate(parameters):
            out.append(f"  {parameter.declaration} [[buffer({index})]]")
            # Without attributes MLX counts names, not parameters, to find the last output; a
            # shape, strides or rank among the inputs then makes it close the list early.
            last = len(self.input_names) + len(self.output_names) - 1
            closes = index >= max(outputs_from, last) and not attributes
            out.append(") {\n" if closes else ",\n")
        for index, attribute in enumerate(attributes):
            out.append(f"  {ATTRIBUTES[attribute]} {attribute} [[{attribute}]]")
            out.append(") {\n" if index == len(attributes) - 1 else ",\n")
            parameters.append(Parameter(attribute, "attribute", name=attribute))
        before = "".join(out)
        out += [self.source, "\n}\n"]
        called = function
        if template:
            called += "<" + ", ".join(template_value(value) for _, value in template) + ">"
            out.append(
                f'\ntemplate [[host_name("{function}")]] [[kernel]] decltype({called}) {called};\n'
            )
        return KernelText(
            text="".join(out),
            function=called,
            parameters=tuple(parameters),
            header_lines=self.header.count("\n"),
            source_first=before.count("\n") + 1,
            source_lines=self.source.count("\n") + 1,
        )

    def _function_name(
        self, arrays: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], template: Template
    ) -> str:
        parts = [f"custom_kernel_{self.name}"]
        if template:
            values = (template_value(value) for _, value in template)
            parts.append("".join("_" + value.replace("-", "_") for value in values))
        parts += [TYPE_NAMES[array.dtype] + _mark(array) for array in arrays]
        parts += [TYPE_NAMES[dtype] for dtype in output_dtypes]
        return "_".join(parts)

    def _parameters(
        self, arrays: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype]
    ) -> list[Parameter]:
        """The buffers of the function: inputs with their shapes, strides and ranks, outputs."""
        parameters: list[Parameter] = []
        for index, (name, array) in enumerate(zip(self.input_names, arrays, strict=True)):
            needs = {w for w in ("shape", "strides", "ndim") if f"{name}_{w}" in self.source}
            parameters += _input_parameters(name, array, index, needs)
        for index, (name, dtype) in enumerate(zip(self.output_names, output_dtypes, strict=True)):
            kind = TYPE_NAMES[dtype]
            if self.atomic_outputs:
                kind = f"atomic<{kind}>"
            parameters.append(Parameter(f"device {kind}* {name}", "output", index))
        return parameters


def as_array(x: Any) -> mx.array:
    """An input as MLX takes it: arrays as they are, Python numbers as 0-d arrays."""
    return x if isinstance(x, mx.array) else mx.array(x)
